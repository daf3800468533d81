"""A small model with Hugging Face's Trainer, as users write it; dies once in the middle when it is told to."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Die(TrainerCallback):
    """As a machine that takes a rank away, once. Losses are written down as they are, step by step."""

    def __init__(self, at: int, mark: Path) -> None:
        self._at, self._mark = at, mark

    def on_log(self, args, state, control, logs, **_):
        if args.process_index == 0 and "loss" in logs:
            with self._mark.with_name("losses.jsonl").open("a") as file:
                file.write(f'{{"step": {state.global_step}, "loss": {logs["loss"]!r}}}\n')

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self._at and args.process_index == 0 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--die_at", type=int, default=0)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--max_steps", type=int, default=16)
    parser.add_argument("--enable_jit_checkpoint", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    rows = torch.randint(64, (256, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        save_steps=4 if args.max_steps < 100 else args.max_steps,
        save_total_limit=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **({"enable_jit_checkpoint": True} if args.enable_jit_checkpoint else {}),
    )
    trainer = Trainer(
        model=model, args=settings, train_dataset=data, callbacks=[Die(args.die_at, Path(args.output_dir, "died"))]
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
