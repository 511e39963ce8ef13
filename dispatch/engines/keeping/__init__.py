"""keeping: an engine's lives, one after the other: the actor that owns it and the task that restarts it."""
