"""Bodies of HTTP requests and responses."""
