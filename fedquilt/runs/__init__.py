"""One run of a federation: its settings, training, folder and results.

Training
    start.py            `fedquilt.run`: prepare, train and record a run
    prepare.py          `fedquilt.prepare`: build a run from its parts
    preflight.py        checks of task, budgets, nets and objectives before the first round
    arguments.py        checks of the arguments of the functions above
    run.py              `Run`: train, evaluate, deploy, export and save
    loop.py             the loop of every run, from Python and the command line
    auto.py             the engine `auto`: the fastest one on this machine
    best.py             the best round on validation samples
    signals.py          ctrl-C and SIGTERM while a round is recorded

Settings
    experiment.py       `Experiment`: all settings of a federation
    model_settings.py   models by name, unions and searched nets
    data_settings.py    data by name, and its partition
    machine.py          engine, device and precision
    initial_weights.py  weights from a file or a run
    registries.py       classes that settings select by name
    demo.py             settings of the demo, and defaults
    overlay.py          settings over settings, and changes of names
    settings_file.py    settings in a file, whose code must be trusted
    trust.py            the user's list of trusted code
    recipe.py           settings of a run that was started in Python

Files
    folder.py           `Folder`: the folder of a run, as a running process writes it
    folder_files.py     functions that read the folder without a lock
    lock.py             one process at a time writes to a folder
    round_log.py        `rounds.jsonl`
    summary_file.py     `summary.json`
    damage.py           damage to the files of a finished run
    checkpoint.py       checkpoints and their manifests
    about.py            the entry `about` of a manifest
    fingerprint.py      values that must not change when a run is resumed
    client_states.py    states of clients, in memory and on disk
    client_state_logs.py  packs and spills, in which states are on disk
    saved_state.py      `fedquilt.load_state`: states in the checkpoints of a folder
    load.py             `fedquilt.load_run`: rebuild a run from its folder

Results
    description.py      the summary of a run as plain values
    summaries.py        text for tables from a summary
    milestones.py       cost until a target was reached
    per_client.py       costs and results by client and domain
    alignment.py        alignment of a ProgFed run (theorem 1)
    tracking.py         TensorBoard, Weights & Biases and MLflow
    probe.py            memory and speed of a machine, and a budget for it
"""
