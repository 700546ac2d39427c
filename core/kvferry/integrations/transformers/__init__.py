"""transformers as a host engine: its models, decoding from a KV-cache manager's blocks.

``loading`` finds and loads a model, ``paged_cache`` is the cache that its attention writes and reads, ``sampling``
chooses tokens, and ``engine`` runs prefill and decode for requests.
"""
