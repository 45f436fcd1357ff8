"""One adapter per model family, and what several of them share."""
