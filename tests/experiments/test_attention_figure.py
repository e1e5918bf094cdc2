"""What narrations attend to (Fig. 10)."""
import pytest
import torch

import narrator as nar
from beyond.experiments import attention
from helpers import TOY, small, tiny, video
from test_evaluate import command


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3"])
def test_attention_is_that_of_the_models_own_weights(family):
    """With norms of queries and keys (Qwen3), one matrix for queries, keys and values (Phi3)."""
    llm = small(family, pad_token_id=0)
    for p in llm.parameters():
        p.data *= 4                            # attention far from uniform
    model = tiny(llm=llm, last_k=2)
    x, narrations = video(model)
    inputs = {}

    def keep_inputs(module, arguments, options):
        inputs.update(options)

    hook = llm.model.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    tokens = model.layout.sequence(narrations)
    mask = nar.attention_mask(tokens, 2)
    with torch.no_grad():
        found, _ = attention.last_attention(model, x, narrations, mask)
    hook.remove()

    llm.set_attn_implementation("eager")
    with torch.no_grad():
        output = llm.model(
            inputs_embeds=inputs["inputs_embeds"],
            position_ids=inputs["position_ids"],
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None],
            use_cache=False,
            output_attentions=True,
        )
    assert torch.allclose(found, output.attentions[-1][0].mean(0), atol=1e-4)


def test_attention_command():
    options = ("--data", "toy", "--limit", 1, "--model", TOY)
    lines = command(*options, main=attention.main).splitlines()[1:]    # below the title
    assert [line[:20].strip() for line in lines] == list(attention.GROUPS)
    shares = [float(line[20:]) for line in lines]
    assert shares[2] == 0 and shares[3] > 0 and sum(shares) < 1        # past frames, memory
