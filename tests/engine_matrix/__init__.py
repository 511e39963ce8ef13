"""The kill matrix of engines: who is killed, by which signal, in which state, and what is left of it."""
