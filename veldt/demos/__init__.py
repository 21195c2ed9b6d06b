"""Demonstration sets: whole episodes of an expert on disk, as step records that any recipe can cut blocks from.

    demos/
      manifest.json               what was recorded, the rows of each episode, and the sha256 of every shard; written last
      shard-00000.safetensors     columns [rows, ...] of the episodes, one after another; about 64 MB each
      .recording                  present during recording; if it is there without a manifest, the recording was cut off

The records are those of `veldt.records.step`: an episode of k actions is k + 1 rows, from its first record to its last,
whose action is zero. Loading a set executes nothing from it, and checks everything before use.

    set.py        Demos: opens, verifies and reads a set
    recording.py  Recording: writes a set; record: plays episodes and records them; Scripted: a policy from an expert

May import records, envs and acting; no experiment, topology or runtime.
"""
