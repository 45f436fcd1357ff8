"""The prospects of requests, for the clients that watch them."""
