"""
watch in Hugging Face's Trainer: fine-tuning as usual, with one more callback. The weights are random and the text is that of
Python's standard library, so that it runs without a hub. Needs transformers and accelerate.

    python examples/huggingface_trainer.py [--steps=60]
"""

import argparse
import glob
import os
import tempfile

import torch
import transformers

from rightbatch import WatchCallback


def documents(longest=128):
    """Functions and classes of the standard library, as bytes: examples of very different length."""
    paths = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:80]
    parts = [part for path in paths for part in open(path, "rb").read().split(b"\n\n\n")]
    return [{"input_ids": list(part[:longest])} for part in parts if len(part) > 8]


def collate(rows):
    """Pads to the longest; labels of the padding are ignored, and that is how watch knows the lengths."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(ids, True, 0), "attention_mask": pad([torch.ones_like(i) for i in ids], True, 0),
            "labels": pad(ids, True, -100)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(argv).steps
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2))
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model, train_dataset=documents(), data_collator=collate, callbacks=[WatchCallback()],
            args=transformers.TrainingArguments(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2,
                learning_rate=2e-3, logging_steps=max(1, steps // 5), save_strategy="no", report_to=[], disable_tqdm=True))
        trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    main()
