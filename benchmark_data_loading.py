"""How fast images come, without a model: `stoker bench data`, under the name that people look for.

python benchmark_data_loading.py [CONFIG_OR_FOLDER] [options of `stoker bench data`]
"""

import sys

from stoker.cli import main

DEFAULT_CONFIG = "configs/single_gpu_full.yaml"

if __name__ == "__main__":
    arguments = sys.argv[1:] or [DEFAULT_CONFIG]
    sys.exit(main(["bench", "data", *arguments]))
