"""One session state machine, one wire protocol, and the runtimes that move the bytes."""
