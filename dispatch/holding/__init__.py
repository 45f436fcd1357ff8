"""Workers that are kept idle for a while, for a request that needs several or soon."""
