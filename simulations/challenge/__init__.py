"""A challenge: frozen updates that anybody's attack or defense can be measured on.

    python -m simulations.challenge freeze BENCH --root FOLDER
    python -m simulations.challenge enter BENCH ENTRIES/strongest --preset strongest
    python -m simulations.challenge score BENCH ENTRIES RUNS

``freeze`` writes 60 updates of twelve tracks into ``BENCH/updates``, and the private images behind
them into ``BENCH/truth``, which no entry may read. An entry is a folder with one file of images for
each update, made by any program. ``enter`` makes one by a preset of this project or by breaching.
``score`` measures all entries alike, and writes a run folder and a report for each entry and track.
To measure a defense, freeze again with ``--defense NAME``, and let the same attacks enter.

An update is a safetensors file with the tensors ``sent.NAME`` and ``buffer.NAME`` of the model that
the client got, and ``change.NAME``, what training added to it. Its metadata holds, under ``told``,
what the server knows as JSON: the name of the network (:data:`.portfolio_cases.NETWORKS`), the
shape, classes and normalisation of the inputs, and the number of samples, steps and learning rate.
An entry's file has the update's name and the ending ``.npz``. It holds ``images`` (B, C, H, W) in
[0, 1] in any order, ``labels`` (B,), −1 for unknown ones, and, if it likes, ``cpu_seconds``.

``simulations/examples/outside_attack.py`` is an attack from outside, in forty lines.
"""
