"""The Ray runtime: session, placement, actors, engines and weight transport."""
