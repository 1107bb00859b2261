"""GPT2-WikiText-103: the model against `transformers`, gradients and metrics against plain loops, and its text."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cdgrab.tasks.tiny_gpt2 import TinyGpt2


def transformers_twin(model: TinyGpt2) -> GPT2LMHeadModel:
    """`transformers`' GPT-2 with the same weights, in float64."""
    body = model.body
    config = GPT2Config(
        vocab_size=body.tokens.num_embeddings,
        n_positions=body.positions.num_embeddings,
        n_embd=body.tokens.embedding_dim,
        n_layer=len(body.blocks),
        n_head=body.blocks[0].attention.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        attn_implementation="eager",
    )
    twin = GPT2LMHeadModel(config).double().eval()
    pairs = [(body.tokens, twin.transformer.wte), (body.positions, twin.transformer.wpe)]
    pairs.append((body.norm, twin.transformer.ln_f))
    for mine, other in zip(body.blocks, twin.transformer.h, strict=True):
        pairs += [(mine.attention_norm, other.ln_1), (mine.norm, other.ln_2), (mine.expand, other.mlp.c_fc)]
        pairs += [(mine.contract, other.mlp.c_proj)]
        pairs += [(mine.attention.input, other.attn.c_attn), (mine.attention.output, other.attn.c_proj)]
    with torch.no_grad():
        for mine, other in pairs:
            transposed = isinstance(mine, torch.nn.Linear)  # theirs are called Conv1D
            other.weight.copy_(mine.weight.T if transposed else mine.weight)
            if hasattr(mine, "bias"):
                other.bias.copy_(mine.bias)
    return twin


def perturbed(model):
    """Biases and norms away from their initial zeros and ones, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("sizes", [{}, {"context": 12, "width": 24, "layers": 3, "heads": 4}])
def test_model_equals_transformers(sizes):
    model = perturbed(TinyGpt2(97, **sizes).double())
    twin = transformers_twin(model)
    assert sum(p.numel() for p in model.parameters()) == twin.num_parameters()
    tokens = torch.randint(97, (3, sizes.get("context", 128)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for sequences in (tokens, tokens[:, :5]):
            output = twin(sequences, output_hidden_states=True)
            torch.testing.assert_close(model(sequences), output.logits, rtol=0, atol=1e-10)
            torch.testing.assert_close(model.body(sequences), output.hidden_states[-1], rtol=0, atol=1e-10)
            for row, sequence in enumerate(sequences):
                torch.testing.assert_close(model(sequence), output.logits[row], rtol=0, atol=1e-10)


def test_model_has_the_papers_size_and_gpt2s_initialisation():
    torch.manual_seed(0)
    model = TinyGpt2(50_257)
    assert sum(p.numel() for p in model.parameters()) == 6_846_080
    deviations = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, deviation in deviations.items():
        residual = name.endswith(("attention.output.weight", "contract.weight"))
        assert deviation == pytest.approx(0.01 if residual else 0.02, rel=0.05), name
    vectors = {name: p for name, p in model.named_parameters() if p.dim() == 1}
    assert all((p == (1 if "norm.weight" in name else 0)).all() for name, p in vectors.items())
