"""The routes of the HTTP API, a module per kind of thing."""
