"""The models of a service: where they come from, and what is served of them."""
