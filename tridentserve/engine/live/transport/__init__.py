"""One-sided transfers through NIXL: links, registered memory, parcels and the slab they land in."""
