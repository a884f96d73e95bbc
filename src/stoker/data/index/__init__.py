"""What samples there are: listing them once, keeping the list, choosing a part of them."""
