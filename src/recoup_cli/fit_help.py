"""The texts of ``fit --help``; ``{configs}`` stands for the configurations of the recipe."""

from __future__ import annotations

__all__ = ["FLOW", "LANGUAGE_MODEL"]

FLOW = """\
usage: recoup flow fit [options]

Train a flow on pictures, or on points in the plane. Options, each as --name VALUE:

  --data PATH        a folder of pictures, an .npz of pictures or points, a .csv of points, moons,
                     rings or checkerboard; the built-in digits if left out
  --memory MODE      what backward remembers: linear, sqrt, log, constant, a number of slots, or
                     a number of bytes as "500 MiB"
  --epochs N         number of epochs (30)
  --batch-size N     pictures in a batch (64)
  --out DIR          folder of the run (runs/flow/fit-1, or the next number)
  --seed N           seed of weights, order, noise and dropout (0)
  --threads N        threads on CPU
  --resume CKPT      go on from a checkpoint, with its settings, in its folder
  --finetune CKPT    begin a new run with the weights of a checkpoint, and its settings
  --config FILE      settings from a file, or of the recipe:{configs}
  --model.flow NAME  glow, nice, realnvp, flowpp or iresnet (glow)
  --model.conditional true
                     learn the density given the label, for data with labels
  --data.size N      crop and resize the pictures to N x N
  --data.levels N    number of grey levels to train on (those of the pictures)
  --model.num_levels, --model.num_steps, --model.width, --model.depth, --model.dropout
                     the flow: scales, steps at each, channels in its networks, ...
  --model.learning_rate, --model.optimizer, --early_stopping.patience, ...
  --trainer.accelerator, --trainer.devices, --trainer.precision, ...
                     any setting of Lightning's Trainer

  --help-all         explain all settings
  --print_config     print all settings, as a file for --config"""

LANGUAGE_MODEL = """\
usage: recoup lm fit [options]

Train an AWD-LSTM on text. Options, each as --name VALUE:

  --data PATH        a text file, or a folder with train.txt, valid.txt and test.txt;
                     the documentation of Python if left out
  --config FILE      settings from a file, or of the recipe:{configs}
                     (tiny if left out)
  --memory MODE      what backward remembers: linear, sqrt, or a number of bytes as "500 MiB"
  --epochs N         number of epochs
  --batch-size N     columns of text that are read side by side
  --weight-noise STD variational noise on weights, from --model.weight_noise_start on
  --out DIR          folder of the run (runs/lm/fit-1, or the next number)
  --seed N           seed of weights, windows, masks and noise
  --threads N        threads on CPU
  --resume CKPT      go on from a checkpoint, with its settings, in its folder
  --finetune CKPT    begin with the weights of a checkpoint, and its settings, and average from
                     the first step on, until validation no longer improves
  --data.tokens KIND words, whitespace (for texts that are tokenized) or characters
  --data.min_count, --data.max_vocab_size, --data.bptt, --data.eval_batch_size, ...
  --model.embed_size, --model.hidden_size, --model.num_layers, --model.weight_dropout, ...
  --model.learning_rate, --model.clip, --model.averaging, --early_stopping.patience, ...
  --trainer.accelerator, --trainer.precision, ...
                     any setting of Lightning's Trainer

  --help-all         explain all settings
  --print_config     print all settings, as a file for --config"""
