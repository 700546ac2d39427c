"""What happened when in a worker, for ui.perfetto.dev: ``ring`` keeps it, ``perfetto`` writes it."""
