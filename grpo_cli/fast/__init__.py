"""The fast path of the Llama family (Llama, Mistral, Qwen2, Qwen3): rollout, reference and update by a small decoder of our own.

A group's prompt is read once and its keys are shared by the G samples, in sampling and, exactly and with gradient, in the update; nothing
is padded; frozen layers are fused and cost no gradient of their own. The plain transformers forward is its oracle: in the tests, at the
start of every run (`rollout.check_native`), and as the way of every model that it does not know.
"""
