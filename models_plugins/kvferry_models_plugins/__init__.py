"""First-party model plugins: one small module a model family."""
