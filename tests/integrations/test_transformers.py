"""Small, randomly initialised transformers models with coflash's attention against their eager attention."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from coflash.integrations import register_with_transformers  # noqa: E402
from coflash.integrations import transformers as integration  # noqa: E402
from coflash.integrations.transformers import Band, UnstoredMask, make_mask, read_band  # noqa: E402

VOCABULARY = 99
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
)
GROUPED = dict(COMMON, num_key_value_heads=2)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=5))


def gemma2():
    """Soft-capped scores, and sliding and full layers in turn."""
    config = transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0)
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    """Attention sinks, and sliding and full layers in turn."""
    config = transformers.GptOssConfig(
        **GROUPED, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.GptOssForCausalLM(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**COMMON))


CAUSAL = [llama, mistral, gemma2, gpt_oss]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_with_transformers()


def pair(make):
    """One model twice: with eager attention and with coflash's."""
    torch.manual_seed(0)
    eager = make().eval()
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if "sinks" in name:
                parameter.normal_()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("coflash")
    return eager, ours


@pytest.fixture
def masks(monkeypatch):
    """The layouts of all masks that layers were given; None where a mask went as a `mask_mod`."""
    seen = []
    original = integration.attention_forward

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask.meaning if isinstance(attention_mask, UnstoredMask) else attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(integration, "attention_forward", spy)
    register_with_transformers()
    yield seen
    monkeypatch.undo()
    register_with_transformers()


def output(model, **inputs):
    result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state


def compare(make, valid=None, **inputs):
    """Outputs at the valid positions and all parameters' gradients."""
    results = []
    for model in pair(make):
        out = output(model, **inputs)
        if valid is not None:
            out = out[valid.bool()]
        torch.manual_seed(1)
        (out * torch.randn_like(out)).sum().backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (expected, expected_grads), (out, grads) = results
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert grads.keys() == expected_grads.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected_grads[name], atol=2e-4, rtol=2e-4, msg=name)


def tokens(batch=3, seqlen=12):
    return torch.randint(1, VOCABULARY, (batch, seqlen))


@pytest.mark.parametrize("make", [*CAUSAL, bert])
def test_without_mask(make, masks):
    compare(make, input_ids=tokens())
    assert masks and all(mask is not None and mask.packing is None for mask in masks)


LEFT = torch.tensor([[1] * 12, [0] * 5 + [1] * 7, [0] * 11 + [1]])
HOLES = torch.tensor([[1] * 12, [1, 0] * 6, [0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1]])


@pytest.mark.parametrize("make", [*CAUSAL, bert])
@pytest.mark.parametrize("padding", [LEFT, LEFT.flip(1)], ids=["left", "right"])
def test_padding_is_packed_away(make, padding, masks):
    compare(make, valid=padding, input_ids=tokens(), attention_mask=padding)
    assert masks and all(mask is not None and mask.packing is not None for mask in masks)


@pytest.mark.parametrize("make", [llama, mistral, bert])
def test_padding_between_tokens(make, masks):
    compare(make, valid=HOLES, input_ids=tokens(), attention_mask=HOLES)
    # A window counts the padding in between, so it can't be packed away there.
    assert all((mask is None) == (make is mistral) for mask in masks)


@pytest.mark.parametrize("make", [llama, mistral, gemma2])  # gpt-oss doesn't tell documents apart
def test_packed_documents(make, masks):
    lengths = [[7, 1, 12], [20], [10, 10]]
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    compare(make, input_ids=tokens(3, 20), position_ids=position_ids, use_cache=False)
    assert all(mask is not None and len(mask.packing.cu_seqlens_q) == 7 for mask in masks)


def test_packed_documents_equal_documents_apart():
    _, ours = pair(llama)
    row = tokens(1, 20)
    position_ids = torch.cat([torch.arange(8), torch.arange(12)])[None]
    together = output(ours, input_ids=row, position_ids=position_ids, use_cache=False)
    apart = torch.cat([output(ours, input_ids=row[:, :8]), output(ours, input_ids=row[:, 8:])], dim=1)
    torch.testing.assert_close(together, apart)


def test_lengths_given_by_the_caller():
    _, ours = pair(llama)
    row, cu = tokens(1, 20), torch.tensor([0, 8, 20])
    position_ids = torch.cat([torch.arange(8), torch.arange(12)])[None]
    expected = output(ours, input_ids=row, position_ids=position_ids, use_cache=False)
    layer = ours.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (4, 2, 2))
    given, _ = integration.attention_forward(layer, q, k, v, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    found, _ = integration.attention_forward(layer, q, k, v, None, position_ids=position_ids)
    halves = [
        integration.attention_forward(layer, *(t[:, :, part] for t in (q, k, v)), None)[0]
        for part in (slice(0, 8), slice(8, 20))
    ]
    torch.testing.assert_close(given, torch.cat(halves, dim=1))
    torch.testing.assert_close(found, given)
    assert expected.shape == (1, 20, VOCABULARY)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("make", [llama, gpt_oss])
def test_four_dimensional_mask(make, dtype):
    visible = (torch.rand(3, 1, 12, 12) < 0.6) | torch.eye(12, dtype=torch.bool)
    minimum = torch.finfo(torch.float32).min
    added = torch.zeros(visible.shape).masked_fill(~visible, minimum)
    eager, ours = pair(make)
    ids = tokens()
    expected = output(eager, input_ids=ids, attention_mask=_per_layer(eager, added))
    mask = _per_layer(ours, visible if dtype == torch.bool else added)
    torch.testing.assert_close(
        output(ours, input_ids=ids, attention_mask=mask), expected, atol=2e-5, rtol=2e-5
    )


def _per_layer(model, mask):
    kinds = getattr(model.config, "layer_types", None)
    return {kind: mask for kind in kinds} if kinds and model.config.model_type == "gpt_oss" else mask


@pytest.mark.parametrize("make", CAUSAL)
@pytest.mark.parametrize("padding", [None, LEFT], ids=["no padding", "left padding"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(make, padding, cache):
    eager, ours = pair(make)
    ids = tokens()
    results = [
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if padding is None else padding,
            max_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for model in (eager, ours)
    ]
    assert torch.equal(results[0].sequences, results[1].sequences)
    for ours_step, eager_step in zip(results[1].logits, results[0].logits, strict=True):
        torch.testing.assert_close(ours_step, eager_step, atol=5e-5, rtol=5e-5)


def test_prefill_in_pieces():
    """A second call with several queries over a cache: the diagonal is at the bottom right."""
    eager, ours = pair(mistral)
    ids = tokens(2, 14)
    whole = output(eager, input_ids=ids)
    cache = transformers.DynamicCache(config=ours.config)
    keyword = "cache" if "cache" in inspect.signature(ours.forward).parameters else "past_key_values"
    first = ours(input_ids=ids[:, :6], **{keyword: cache})
    second = ours(input_ids=ids[:, 6:], **{keyword: cache})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, atol=2e-5, rtol=2e-5)


def test_cross_attention():
    """The encoder's padding hides keys only: every decoder position is a query."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    )
    compare(
        lambda: transformers.BartModel(config),
        input_ids=tokens(3, 12),
        attention_mask=LEFT.flip(1),
        decoder_input_ids=tokens(3, 12),
    )


def test_relative_position_bias():
    """T5 adds a learned bias to the scores, whose gradient must arrive."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=4
    )
    compare(
        lambda: transformers.T5Model(config),
        input_ids=tokens(3, 12),
        attention_mask=LEFT.flip(1),
        decoder_input_ids=tokens(3, 9),
    )


def test_encoder_with_windows(masks):
    """ModernBERT: windows to both sides in every second layer, and padding."""
    config = transformers.ModernBertConfig(
        **COMMON,
        local_attention=6,
        global_attn_every_n_layers=2,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    padding = LEFT.flip(1)
    compare(
        lambda: transformers.ModernBertModel(config),
        valid=padding,
        input_ids=tokens(),
        attention_mask=padding,
    )
    assert {(mask.band.left, mask.band.right) for mask in masks} >= {(3, 3), (None, None)}


def test_latent_attention():
    """DeepSeek-V3: values narrower than keys."""
    config = transformers.DeepseekV3Config(
        **COMMON,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=2,
    )
    compare(
        lambda: transformers.DeepseekV3ForCausalLM(config),
        valid=LEFT,
        input_ids=tokens(),
        attention_mask=LEFT,
    )


def test_images_packed_by_the_model():
    """Qwen2-VL's vision tower packs images of different sizes and hands over their lengths."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4
    )
    grid = torch.tensor([[1, 4, 4], [1, 8, 4]])
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    compare(lambda: Qwen2VisionTransformerPretrainedModel(config), hidden_states=patches, grid_thw=grid)


def test_gradient_checkpointing():
    eager, ours = pair(llama)
    ids = tokens()
    for model in (eager, ours):
        model.train()
        model.gradient_checkpointing_enable()
        model(input_ids=ids, attention_mask=LEFT).logits[LEFT.bool()].square().sum().backward()
    for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=2e-4, rtol=2e-4)


def test_compiled():
    eager, ours = pair(mistral)
    ids = tokens()
    compiled = torch.compile(ours, backend="aot_eager")
    expected = output(eager, input_ids=ids, attention_mask=LEFT)
    out = output(compiled, input_ids=ids, attention_mask=LEFT)
    torch.testing.assert_close(out[LEFT.bool()], expected[LEFT.bool()], atol=2e-5, rtol=2e-5)


def test_bf16():
    eager, ours = pair(llama)
    ids = tokens()
    exact = output(eager, input_ids=ids)
    errors = [
        (output(model.bfloat16(), input_ids=ids).float() - exact).abs().max() for model in (eager, ours)
    ]
    assert errors[1] <= 2 * errors[0]


def test_attention_weights_are_refused():
    _, ours = pair(llama)
    layer = ours.model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(NotImplementedError, match="output_attentions.*eager"):
        integration.attention_forward(layer, q, q, q, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match="LlamaAttention passes sinks"):
        integration.attention_forward(layer, q, q, q, None, sinks=q)


class TestMask:
    """`make_mask` itself: what it says, and that the dense mask is the one transformers makes."""

    def test_bands_are_read(self):
        library = transformers.masking_utils
        assert read_band(library.causal_mask_function) == Band(right=0)
        assert read_band(library.bidirectional_mask_function) == Band()
        assert read_band(library.sliding_window_causal_mask_function(4)) == Band(left=3, right=0)
        assert read_band(library.sliding_window_bidirectional_mask_function(4)) == Band(left=4, right=4)
        assert read_band(library.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))) is None
        assert read_band(library.or_masks(library.causal_mask_function)) is None
        assert read_band(lambda b, h, q, k: q >= k) is None

    @pytest.mark.parametrize(
        "q_length,kv_length,q_offset,kv_offset", [(6, 6, 0, 0), (2, 8, 6, 0), (3, 9, 4, 0)]
    )
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("padded", [False, True])
    def test_layout_means_the_dense_mask(self, q_length, kv_length, q_offset, kv_offset, window, padded):
        """Attending with the layout and with the dense mask gives the same."""
        library = transformers.masking_utils
        function = (
            library.causal_mask_function
            if window is None
            else library.sliding_window_causal_mask_function(window)
        )
        padding = None
        if padded:
            padding = torch.ones(2, q_offset + q_length, dtype=torch.bool)
            padding[1, :2] = False
        mask = make_mask(
            2, q_length, kv_length, q_offset, kv_offset, mask_function=function, attention_mask=padding
        )
        assert isinstance(mask, UnstoredMask) and mask.meaning is not None
        dense = mask & True
        assert type(dense) is torch.Tensor and dense.shape == mask.shape
        q = torch.randn(2, q_length, 4, 8)
        k, v = (torch.randn(2, kv_length, 2, 8) for _ in range(2))
        module = torch.nn.Module()
        expected, _ = integration.attention_forward(module, *(t.transpose(1, 2) for t in (q, k, v)), dense)
        out = mask.meaning.attend(q, k, v)
        seen = dense.any(-1)[:, 0]  # (batch, seqlen_q)
        if padding is not None:
            seen &= padding[:, q_offset:]
        torch.testing.assert_close(out[seen], expected[seen])
        assert (out[~seen] == 0).all()

    def test_nothing_of_quadratic_size_is_made(self):
        n = 1 << 17
        mask = make_mask(
            1, n, n, mask_function=transformers.masking_utils.sliding_window_causal_mask_function(64)
        )
        assert mask.shape == (1, 1, n, n) and mask.meaning.band == Band(left=63, right=0)

    def test_custom_function_goes_as_mask_mod(self):
        library = transformers.masking_utils
        function = library.chunked_causal_mask_function(4, torch.tensor([0, 2]))
        padding = torch.ones(2, 10, dtype=torch.bool)
        padding[1, :2] = False
        mask = make_mask(2, 10, 10, mask_function=function, attention_mask=padding)
        assert mask.meaning is None
        q, k, v = (torch.randn(2, heads, 10, 8) for heads in (4, 2, 2))
        module = torch.nn.Module()
        out, _ = integration.attention_forward(module, q, k, v, mask)
        expected, _ = integration.attention_forward(module, q, k, v, mask & True)
        torch.testing.assert_close(out, expected)
