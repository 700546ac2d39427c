"""One side of a deployment behind HTTP: ``/v1/completions`` as OpenAI clients and TensorRT-LLM routers speak it.

``protocol`` reads requests, ``answers`` writes them, ``failures`` maps errors to statuses; ``jobs`` are the steps of a
request, ``engine_loop`` runs them turn by turn; ``app`` is the HTTP side, ``worker`` the process.
"""
