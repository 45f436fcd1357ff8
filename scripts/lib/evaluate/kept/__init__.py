"""Where finished cells are kept, so that a rerun skips them."""
