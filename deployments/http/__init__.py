"""The HTTP side: routes, bodies, forms, server-sent events and errors."""
