"""kvferry: decides, explains, builds and moves the KV cache of disaggregated LLM serving."""
