import pytest
import torch

from kvferry.checkpoint import model_geometry
from kvferry.integrations.transformers.engine import GenerationRequest
from kvferry.integrations.transformers.loading import LoadedModel


@pytest.fixture(scope="module")
def small_gemma(tmp_path_factory) -> LoadedModel:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = Gemma3ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.3)
    return LoadedModel(model, None, tmp_path_factory.getbasetemp(), model_geometry(config.to_dict(), "float32"), "cpu")


def test_the_geometry_says_which_layers_slide(small_gemma):
    assert small_gemma.geometry.windows == (16, 16, None, 16)


@pytest.mark.parametrize("length", [5, 16, 17, 90])
def test_sliding_windows_hide_what_the_blocks_still_hold(small_gemma, make_engine, reference, length):
    prompt = tuple(torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    engine = make_engine(small_gemma, prefill_chunk=24)
    running = engine.prefill(GenerationRequest(1, prompt, 30, ignore_stop=True))
    output = list(engine.decode(running))
    assert output == reference(small_gemma, prompt, 30, chunk=24, ignore_stop=True)
    assert len(set(output)) > 3
