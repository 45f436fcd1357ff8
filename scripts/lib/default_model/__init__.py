"""The default model: a small text-to-image model that this repository trains on pictures which it draws itself."""
