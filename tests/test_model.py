import copy

import pytest
import torch

from model import spectral_norm
from rightbatch import rows
from tests.helpers import GPT_SHAPE, check_against_oracle, gpt_batch, make_gpt, measured


@pytest.mark.parametrize("accum", [1, 2, 3, 4])
@pytest.mark.parametrize("overrides", [
    {}, {"bias": False}, {"norm": "rmsnorm"}, {"norm": "rmsnorm", "bias": False}, {"tie_weights": False},
    {"activation_checkpointing": "block"}, {"cos_attn": (1,)}, {"spectral_qkv": (0,)}, {"norm_impl": "ref"}], ids=str)
def test_probe_gradients_are_the_squared_norms_of_each_examples_contribution(overrides, accum):
    x, y = gpt_batch(3 * accum)
    check_against_oracle(make_gpt(**overrides), x, y, micro=3)


EXACT = [{}, {"bias": False}, {"tie_weights": False}, {"norm": "rmsnorm"}, {"cos_attn": (0, 1)}, {"spectral_qkv": (0,)},
         {"activation_checkpointing": "block"}, {"bias": False, "tie_weights": False, "norm": "rmsnorm"}]


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("overrides", EXACT, ids=str)
def test_exact_mode_gives_the_squared_norms_of_every_parameter(overrides, accum):
    x, y = gpt_batch(4 * accum)
    check_against_oracle(make_gpt(**overrides), x, y, micro=4, mode="exact")


@pytest.mark.parametrize("mode", ["norm", "exact"])
@pytest.mark.parametrize("overrides", [{}, {"bias": False}, {"tie_weights": False, "norm": "rmsnorm"}, {"spectral_qkv": (1,)}],
                         ids=str)
def test_weighted_norms_come_from_the_same_pass(overrides, mode):
    model = make_gpt(**overrides)
    x, y = gpt_batch(4)
    tables = rows.tables(model)
    metrics = {n: torch.rand_like(p) + 0.1 for n, p in model.named_parameters() if all(p is not table for table in tables)}
    check_against_oracle(model, x, y, micro=2, mode=mode, metrics=metrics)


def test_exact_mode_with_dropout_measures_the_masks_that_were_drawn():
    """One example at a time with the mask of its place in the batch: dropout replaced by recorded masks."""
    model = make_gpt(dropout=0.4)
    x, y = gpt_batch(3)
    masks, mode = [], "record"

    def dropout(t, p, training):
        if mode == "record":
            masks.append((torch.rand(t.shape) > p).double() / (1 - p))
            return t * masks[-1].to(t.dtype)
        return t * masks[next(position)][example:example + 1].to(t.dtype)

    import model as module
    real, module.F.dropout = module.F.dropout, dropout
    for block in model.h:
        block.attn.dropout = 0.0  # inside the fused attention no mask can be seen
    try:
        found = measured(model, x, y, 3, mode="exact")
        mode, truth = "replay", []
        double = copy.deepcopy(model).double()
        for example in range(3):
            double.zero_grad()
            position = iter(range(len(masks)))
            (double(x[example:example + 1], y[example:example + 1])[1] / 3).backward()
            truth.append(sum(float((p.grad**2).sum()) for p in double.parameters()))
    finally:
        module.F.dropout = real
    assert found.sum((0, 1)).tolist() == pytest.approx(truth, rel=1e-5)
    assert len(masks) == 1 + 2 * 2


@pytest.mark.parametrize("overrides", [{}, {"bias": False, "tie_weights": False}, {"norm": "rmsnorm"}], ids=str)
def test_every_parameter_belongs_to_exactly_one_exact_site(overrides):
    model = make_gpt(**overrides)
    names = [n for n, _ in model.named_parameters()]
    covered = [n for site, _, _ in model.probe_sites("exact") for n in (site, site.replace("weight", "bias")) if n in names]
    assert sorted(covered) == sorted(names)
    assert {g for _, g, _ in model.probe_sites("exact")} <= {"norm", "attention", "mlp", "embedding", "head"}


def test_probes_of_no_known_mode_are_refused():
    x, y = gpt_batch(2)
    with pytest.raises(ValueError, match="probes has 3 sites, expected 5"):
        make_gpt()(x, y, probes=torch.zeros(3, 2, 2, requires_grad=True))


@pytest.mark.parametrize("overrides, mode, backend", [
    ({}, "norm", "inductor"), ({}, "exact", "inductor"),
    ({"norm": "rmsnorm", "tie_weights": False, "activation_checkpointing": "block"}, "exact", "aot_eager"),
    ({"activation_checkpointing": "block", "cos_attn": (0,), "spectral_qkv": (1,)}, "norm", "aot_eager"),
    ({"activation_checkpointing": "block", "cos_attn": (0,), "spectral_qkv": (1,)}, "exact", "aot_eager")], ids=str)
def test_the_same_under_torch_compile_without_a_graph_break(overrides, mode, backend):
    model = make_gpt(**overrides)
    x, y = gpt_batch(4)
    check_against_oracle(model, x, y, micro=2, forward=torch.compile(model, fullgraph=True, backend=backend), mode=mode)


def test_every_norm_layer_has_a_site_and_every_site_is_a_norm_layer():
    model = make_gpt()
    names = {name for name, _, _ in model.probe_sites("norm")}
    assert names == {n for n, _ in model.named_parameters() if ".ln_" in f".{n}" and n.endswith("weight")}
    with pytest.raises(ValueError, match="mode='layers'"):
        model.probe_sites("layers")


def test_exact_tracking_changes_gradients_by_rounding_only():
    x, y = gpt_batch(4)
    results = []
    for tracked in (False, True):
        model = make_gpt()
        probes = torch.zeros(len(model.probe_sites("exact")), 2, 4, requires_grad=True) if tracked else None
        loss = model(x, y, probes=probes)[1]
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max()))


@pytest.mark.parametrize("overrides", [{}, {"norm": "rmsnorm"}, {"bias": False, "tie_weights": False}, {"dropout": 0.3}],
                         ids=str)
def test_tracking_changes_neither_loss_nor_gradients_nor_keys(overrides):
    x, y = gpt_batch(4)
    results = []
    for tracked in (False, True):
        model = make_gpt(**overrides)
        torch.manual_seed(5)  # the same dropout mask
        probes = torch.zeros(len(model.probe_sites("norm")), 2, 4, requires_grad=True) if tracked else None
        loss = model(x, y, probes=probes)[1]
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}, list(model.state_dict())))
    (loss_a, grads_a, keys_a), (loss_b, grads_b, keys_b) = results
    assert torch.equal(loss_a, loss_b) and keys_a == keys_b
    assert all(torch.equal(grads_a[n], grads_b[n]) for n in grads_a)


def test_activation_checkpointing_changes_nothing_but_memory():
    x, y = gpt_batch(4)
    grads = []
    for how in ("none", "block"):
        model = make_gpt(activation_checkpointing=how, dropout=0.2)
        torch.manual_seed(3)
        model(x, y)[1].backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_attention_is_causal():
    model = make_gpt(cos_attn=(0,)).eval()
    x, y = gpt_batch(1)
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % GPT_SHAPE["vocab_size"]
    a, b = model(x, y)[0], model(changed, y)[0]
    assert torch.equal(a[0, :7], b[0, :7]) and not torch.equal(a[0, 7:], b[0, 7:])


def test_attention_matches_the_textbook_formula():
    model = make_gpt().eval()
    attn = model.h[0].attn
    x = torch.randn(2, 5, 24)
    q, k, v = (t.view(2, 5, 2, 12).transpose(1, 2) for t in attn.c_attn(x).split(24, dim=2))
    weights = (q @ k.transpose(-1, -2) / 12**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    expected = attn.c_proj((weights @ v).transpose(1, 2).reshape(2, 5, 24))
    torch.testing.assert_close(attn(x, {}), expected)


def test_cosine_attention_ignores_the_length_of_queries_and_keys():
    model = make_gpt(cos_attn=(0,)).eval()
    attn, x = model.h[0].attn, torch.randn(2, 5, 24)
    before = attn(x, {})
    with torch.no_grad():
        attn.c_attn.weight[:48] *= 100
        attn.c_attn.bias[:48] *= 100
    torch.testing.assert_close(attn(x, {}), before, rtol=1e-4, atol=1e-5)


def test_spectral_qkv_ignores_the_scale_of_its_matrix_and_finds_it_to_a_few_per_cent():
    model = make_gpt(spectral_qkv=(0,), bias=False).eval()
    attn, x = model.h[0].attn, torch.randn(2, 5, 24)
    before = attn(x, {})
    with torch.no_grad():
        attn.c_attn.weight *= 50
    torch.testing.assert_close(attn(x, {}), before, rtol=1e-4, atol=1e-5)
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    assert float(spectral_norm(weight)) == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=0.05)


def test_tied_weights_are_one_parameter_and_untied_are_two():
    tied, untied = make_gpt(), make_gpt(tie_weights=False)
    assert tied.lm_head.weight is tied.wte.weight
    assert untied.parameter_count() - tied.parameter_count() == GPT_SHAPE["vocab_size"] * GPT_SHAPE["n_embd"]


def test_matrices_decay_and_vectors_do_not():
    groups = make_gpt().parameter_groups(0.1)
    assert {p.dim() for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.1
    assert {p.dim() for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert sum(len(g["params"]) for g in groups) == len(list(make_gpt().parameters()))


def test_flops_per_token_agree_with_torchs_own_counter():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    model = make_gpt(attention_impl="torch")
    x, y = gpt_batch(4)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, y)[1].backward()
    attention = 6 * model.config.n_layer * model.config.block_size * model.config.n_embd
    # unfused attention computes all of T x T; causal attention needs half of it, which is what we count
    assert counter.get_total_flops() / x.numel() == model.flops_per_token() + attention


def test_logits_come_for_the_last_position_alone_without_targets():
    model = make_gpt().eval()
    x, y = gpt_batch(2)
    last, loss = model(x)
    assert loss is None and last.shape == (2, 1, GPT_SHAPE["vocab_size"])
    torch.testing.assert_close(last[:, 0], model(x, y)[0][:, -1])


def test_too_long_an_input_is_refused():
    with pytest.raises(ValueError, match="13 tokens do not fit into block_size=12"):
        make_gpt()(torch.zeros(1, 13, dtype=torch.int64))
