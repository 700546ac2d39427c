"""First-party model plugins: one small module a model family.

Each states what TensorRT-LLM's source or tests say of its architectures, under the rules before #18134 (2026-08-24),
which made PYTHON the default; those rules are kvferry's. Read 2026-11-30. A default of manager V2 is also given where
kvferry's V1 has no room for what the model keeps.

Not here, and why:

- Llama 4, ``Gemma3ForConditionalGeneration``, Mistral: left unchanged by #16787 (2026-07-23); V2 for Llama, Llama 4 and
  Gemma 3 is of the later era (#18342, 2026-08-28, and #19004).
- Mistral Large 3: only inferred, by inheritance from DeepSeek-V3; kvferry matches names.
- Gemma 4: known from a pull request's list of files alone.
- Nemotron-H, Nemotron Nano VL and Omni, Puzzle: a test says PYTHON and V2, of unknown date, the multimodal ones after
  #18134 (#19140, 2026-09).
- Qwen4-Exp, GLM-5-Next: later than #18134, with settings that kvferry has not.
- MiniMax-M3: whether by preference or by default is not known. MiniMax-M2: deliberately none.
- DeepSeek-V4.1: delegates to V4 in a wrapper of the later era.
"""
