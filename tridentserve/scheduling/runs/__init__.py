"""Assignments that are being carried out, and the requests in them."""
