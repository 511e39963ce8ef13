"""observe: what can be seen of a pool: its accounting (`stats`), metrics through Ray (`metrics`), spans
(`tracing`), and events of which a thousand alike are told once (`quiet`)."""
