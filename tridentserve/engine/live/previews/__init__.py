"""Previews of requests that are being denoised, for the clients that ask for them."""
