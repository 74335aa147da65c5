"""Hugging Face Trainer: a callback that adopts and compiles the model when training begins.

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(AdoptCallback(trainer))
    trainer.train()

When ``on_train_begin`` is called the Trainer has wrapped the model, made its optimizer and loaded the checkpoint that
it resumes from. Adoption changes none of these objects.
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from inductor_passes.adoption import AdoptError
from inductor_passes.integrations.accelerate import adopt_prepared


class AdoptCallback(TrainerCallback):
    """Adopts the Trainer's model at the start of training: FSDP2 (``fsdp_config``) or DDP.

    Args:
        trainer: that the callback is added to.
        **how: arguments of ``torch.compile``; default: ``options=inductor_passes.options()``.
    """

    def __init__(self, trainer: Trainer, **how: Any) -> None:
        self._trainer = trainer
        self._how = how

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Adopt and compile, unless an earlier ``train()`` did.

        Raises:
            AdoptError: the Trainer compiles as well, or a setting that only hooks can serve.
        """
        del state, control, kwargs
        if args.torch_compile:
            raise AdoptError(
                "torch_compile=True makes the Trainer compile by itself, under FSDP2 before it is sharded: leave "
                "it, torch_compile_backend and torch_compile_mode out; AdoptCallback compiles, with what it is given "
                "for torch.compile"
            )
        wrapped = self._trainer.model_wrapped
        if getattr(wrapped, "find_unused_parameters", False) and args.ddp_find_unused_parameters is None:
            raise AdoptError(
                "the Trainer has DDP look for unused parameters unless it is told not to, and compiled graphs cannot "
                "serve ranks that use different ones: set ddp_find_unused_parameters=False in TrainingArguments"
            )
        adopt_prepared(self._trainer.accelerator, wrapped, **self._how)
