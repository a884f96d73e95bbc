"""Where samples' bytes come from: folders, object stores, a local cache, reading ahead."""
