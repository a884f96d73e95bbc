"""Where samples' bytes come from: folders, object stores, a local copy, one prefetcher. Knows no images or volumes."""
