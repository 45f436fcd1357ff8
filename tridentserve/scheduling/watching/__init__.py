"""A cluster as an onlooker sees it: what each worker has been given, what waits, and what has ended lately."""
