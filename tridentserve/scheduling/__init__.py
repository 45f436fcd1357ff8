"""The pure scheduler: events come in, effects go out, time is an argument. It does no I/O and reads no clock."""
