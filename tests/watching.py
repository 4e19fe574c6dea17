"""What the tests of watch share: models from configs, without a hub, and the oracle, a float64 loop over single examples."""

import copy
import importlib.util

import pytest
import torch

from rightbatch.sites import body_of

TINY = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
B, T = 4, 12
TABLES = ("embedding.weight", "head.weight", "head.bias")  # of Plain


def needs(*names):
    """A test that is skipped where a package is not installed."""
    missing = [name for name in names if not importlib.util.find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def randomise(model, seed=0):
    """Norm weights of ones and biases of zeros would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model.eval()  # no dropout; watch does not care about the mode


def hf(name, config, **settings):
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model_class, config_class = getattr(transformers, name), getattr(transformers, config)
    return randomise(model_class(config_class(**settings)))


def tokens(seed=1, low=3):
    ids = torch.randint(low, 64, (B, T), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids)


def pixels(size=32):
    generator = torch.Generator().manual_seed(1)
    return dict(pixel_values=torch.randn(B, 3, size, size, generator=generator), labels=torch.arange(B) % 2)


class Encoder(torch.nn.Module):
    """torch's own layers, in either layout, with a loss per example."""

    def __init__(self, batch_first):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.body(x).square().mean()


class Plain(torch.nn.Module):
    """The smallest model with a LayerNorm and an RMSNorm: tokens in, mean loss out."""

    def __init__(self, C=16, V=32):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, C)
        self.first, self.second = torch.nn.LayerNorm(C), torch.nn.RMSNorm(C)
        self.hidden, self.head = torch.nn.Linear(C, C), torch.nn.Linear(C, V)

    def forward(self, idx):
        x = self.embedding(idx)
        x = x + self.hidden(self.first(x)).tanh()
        logits = self.head(self.second(x))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


def plain(seed=0, **sizes):
    torch.manual_seed(seed)
    return randomise(Plain(**sizes))


def ids(seed=0, batch=B, length=T, V=32):
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def one_by_one(model, batch, batch_dim=0):
    """[batch of one example]"""
    n = next(v for v in batch.values() if v.dim() > batch_dim).shape[batch_dim]
    return [{k: v.narrow(batch_dim if v.dim() > batch_dim else 0, b, 1) for k, v in batch.items()} for b in range(n)]


def loop(model, batch, shares=None, batch_dim=0):
    """{parameter name: (B, ...) contributions c_b}, by plain autograd in float64, each example alone."""
    model = copy.deepcopy(model).double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    examples = one_by_one(model, batch, batch_dim)
    rows = {}
    for b, example in enumerate(examples):
        model.zero_grad()
        share = 1 / len(examples) if shares is None else float(shares[b])
        (share * loss_of(model(**example))).backward()
        for name, p in model.named_parameters():
            rows.setdefault(name, []).append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(r) for name, r in rows.items()}


def site_rows(model, site, truth):
    """(B, n): the loop's contributions to a site's parameters, weight first."""
    names = {id(p): name for name, p in model.named_parameters()}
    return torch.cat([torch.stack([site.pick(part, c) for c in truth[names[id(p)]]]) for part, p in site.trained.items()], 1)


def site_errors(model, w, truth):
    """{site: largest relative error of its sum c_b and sum c_b^2 against the loop}, from the leaves of an open step."""
    errors = {}
    for site in [site for site in w._hooks.sites if site.open]:
        c, grad = site_rows(model, site, truth), site.leaf.grad.double()
        n = c.shape[1]
        errors[site.name] = max(float((got - want).norm() / want.norm())
                                for got, want in ((grad[:n], c.sum(0)), (grad[n:2 * n], c.square().sum(0))))
    return errors


def body(model):
    """Names of the parameters that are trained and none of the tables."""
    inside = body_of(model)
    return [name for name, p in model.named_parameters() if p in inside]


def pair_of(truth, names):
    """(q, big) of the loop over some parameters."""
    c = torch.cat([truth[name].flatten(1) for name in names], 1)
    return float(c.square().sum()), float(c.sum(0).square().sum())


def loop_of(model, losses, shares=None):
    """The same for losses that are not one call of the model: [function of the model -> loss of one example]."""
    model, rows = copy.deepcopy(model).double(), {}
    for b, loss in enumerate(losses):
        model.zero_grad()
        ((1 / len(losses) if shares is None else float(shares[b])) * loss(model)).backward()
        for name, p in model.named_parameters():
            rows.setdefault(name, []).append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(r) for name, r in rows.items()}


def check_step(w, truth, names, shares=None, rtol=1e-5):
    """w.last against the loop, with its scale."""
    q, big = pair_of(truth, names)
    B = len(next(iter(truth.values())))
    h = 1 / B if shares is None else float(sum(float(s) ** 2 for s in shares))
    assert w.last.examples == B and abs(w.last.effective * h - 1) < 1e-5
    assert abs(w.last.small / (q / h) - 1) < rtol and abs(w.last.big / big - 1) < rtol, (w.last, q / h, big)


def documents(n, seed=0):
    """Ragged examples, as a tokenizer makes them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 13, (n,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 64, (length,), generator=generator).tolist()} for length in lengths]


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    idx = torch.tensor([r["input_ids"] + [0] * (width - len(r["input_ids"])) for r in rows])
    real = torch.arange(width) < torch.tensor([len(r["input_ids"]) for r in rows])[:, None]
    mask, real[:, 0] = real.clone(), False  # nothing predicts the first token, but Trainer would count it in its mean for GPT-2
    return dict(input_ids=idx, attention_mask=mask.long(), labels=idx.masked_fill(~real, -100))


def truth_of_ragged(model, rows):
    """(q, big, shares) of a token mean over all rows: the loop on each alone."""
    n = torch.tensor([len(r["input_ids"]) - 1 for r in rows], dtype=torch.float64)
    truth = loop(model, collate(rows), shares=n / n.sum())
    norms = [name for name, p in model.named_parameters() if "norm" in name or ".ln_" in name]
    return (*pair_of(truth, norms), n / n.sum())


def trainer_of(tmp_path, model, rows, callback, **settings):
    import transformers
    args = dict(output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1e-3,
                max_steps=2, logging_steps=1, learning_rate=0.0, report_to=[], use_cpu=True, save_strategy="no", seed=1,
                disable_tqdm=True, train_sampling_strategy="sequential")
    return transformers.Trainer(model=model, train_dataset=rows, data_collator=collate, callbacks=[callback],
                                args=transformers.TrainingArguments(**{**args, **settings}))


LENGTHS = torch.tensor([12, 3, 7, 5])


def ragged(seed=1):
    """Right-padded tokens, as a collator makes them; labels of the padding are ignored."""
    idx = torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(T) < LENGTHS[:, None]
    return dict(input_ids=idx * real, attention_mask=real.long(), labels=idx.masked_fill(~real, -100))
