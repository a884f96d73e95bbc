"""Which values of a script's placeholders are tried, in which order, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

from stoker.profile.observed import Observed
from stoker.tune.records import Measured, Outcome, Settings
from stoker.tune.script import read_template
from stoker.tune.script_search import proposals
from tests.doctor.checks.observations import starved
from tests.tune.made_up import search_with


class Formula:
    """Speeds by formula, and what the timers saw in every trial."""

    def __init__(self, rate: Callable[[Settings], float | str], wait_share: float, observed: Observed | None) -> None:
        self._rate, self._wait_share, self._observed = rate, wait_share, observed
        self.ran: list[Settings] = []

    def run(self, settings: Settings, seconds: float) -> Measured:
        self.ran.append(settings)
        rate = self._rate(settings)
        if isinstance(rate, str):
            return Measured("out-of-memory" if rate == "full" else "crashed", detail=rate, took_s=seconds)
        windows = (rate * 0.999, rate, rate * 1.001)
        return Measured("measured", windows, self._wait_share, took_s=seconds, observed=self._observed)


def tuned(
    words: list[str], rate: Callable[[Settings], float | str], wait_share: float = 0.5, observed: Observed | None = None
) -> tuple[Outcome, list[Settings]]:
    template, trier = read_template(["train", *words]), Formula(rate, wait_share, observed)
    found = search_with(trier, template.start, propose=proposals(template, cpus=4))
    different = list(dict.fromkeys(tuple(settings.items()) for settings in trier.ran))
    return found, [dict(settings) for settings in different]


def number(settings: Settings, name: str) -> int:
    value = settings[name]
    assert isinstance(value, int)
    return value


def test_workers_climb_from_one_for_each_core_to_the_best() -> None:
    found, ran = tuned(["{num_workers}"], lambda s: 100.0 * min(1 + number(s, "num_workers"), 7))
    assert found.best == {"num_workers": 6}
    assert [settings["num_workers"] for settings in ran] == [0, 4, 6, 8]


def test_the_simulation_names_the_first_number_of_workers() -> None:
    # Two workers of 40 ms a batch feed a loop of 5 ms: eight cores' worth of work, on as many as the host has.
    found, ran = tuned(["{num_workers=2}"], lambda s: 100.0 * number(s, "num_workers"), 0.75, starved(cpu=0.04))
    assert found.steps[1].predicted is not None
    assert found.steps[1].predicted.expected > 1.5
    assert "75 % of a step is spent waiting for data" in found.steps[1].why
    assert number(ran[1], "num_workers") > 2


def test_the_loader_is_left_alone_where_the_loop_never_waits() -> None:
    found, ran = tuned(["{num_workers=2}", "{prefetch_factor=2}"], lambda _s: 100.0, wait_share=0.01)
    assert (found.best, len(ran)) == (found.original, 1)


def test_a_batch_doubles_until_memory_is_full_and_the_result_is_what_ran() -> None:
    def rate(settings: Settings) -> float | str:
        size = number(settings, "batch_size")
        return "full" if size > 256 else 10.0 * size**0.5

    found, ran = tuned(["{batch_size=64}"], rate, wait_share=0.0)
    assert found.best == {"batch_size": 256}
    assert [settings["batch_size"] for settings in ran] == [64, 128, 256, 512]
    # One that does not fit to begin with is halved.
    found, ran = tuned(["{batch_size=64}"], lambda s: "full" if number(s, "batch_size") > 20 else 10.0)
    assert found.best == {"batch_size": 16}
    assert [settings["batch_size"] for settings in ran[:3]] == [64, 32, 16]


def test_listed_values_are_tried_once_each() -> None:
    speeds = {"pil": 10.0, "cv2": 20.0, "accimage": "no such module"}
    found, ran = tuned(["{decoder=pil|cv2|accimage}"], lambda s: speeds[str(s["decoder"])])
    assert found.best == {"decoder": "cv2"}
    assert [settings["decoder"] for settings in ran] == ["pil", "cv2", "accimage"]


def test_a_script_that_never_runs_is_not_tried_with_other_values() -> None:
    found, ran = tuned(["{num_workers}", "{decoder=pil|cv2}"], lambda _s: "SyntaxError")
    assert (found.before, found.after, len(ran)) == (None, None, 1)
