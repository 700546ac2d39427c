"""First-party transfer backends: one module a transport."""
