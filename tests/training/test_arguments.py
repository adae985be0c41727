import pytest

from hf_deqnar.training.arguments import DataArguments, DeqNarTrainingArguments, ModelArguments, parse_arguments

KINDS = (ModelArguments, DataArguments, DeqNarTrainingArguments)
NEEDED = ["--train_data", "train.tsv", "--source", "en", "--target", "de", "--output_dir", "runs/x"]


def test_flags_and_yaml_file_are_equivalent(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "train_data: train.tsv\nsource: en\ntarget: de\noutput_dir: runs/x\nlearning_rate: 1e-3\nrandom_nfe: true\n"
        "objective: dynamic_kd+ctc\nlr_scheduler_kwargs: {timescale: 100}\n"
        "config:\n  length: ctc\n  tol: 1e-4\n  source_copy: null\ngamma: [1, 2.5]\n"
        "validation_data: null\n"
    )
    flags = [
        *NEEDED,
        "--learning-rate",
        "0.001",
        "--random_nfe",
        "--objective",
        "dynamic_kd+ctc",
        "--gamma",
        "1",
        "2.5",
    ]
    flags += ["--lr_scheduler_kwargs", '{"timescale": 100}']
    flags += ["--config", "length=ctc", "tol=1e-4", "source_copy=null"]
    from_file, from_flags = parse_arguments(KINDS, [str(file)]), parse_arguments(KINDS, flags)
    assert from_file[:2] == from_flags[:2]
    assert from_file[2].to_dict() == from_flags[2].to_dict()
    assert from_file[0].settings() == {"length": "ctc", "tol": 1e-4, "source_copy": None}
    assert from_file[2].random_nfe is True
    assert from_file[2].gamma == [1.0, 2.5]


def test_flag_overrides_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("train_data: train.tsv\nsource: en\ntarget: de\noutput_dir: runs/x\nmax_tokens: 100\n")
    assert parse_arguments(KINDS, [str(file), "--max_tokens", "200"])[2].max_tokens == 200


def test_defaults_are_those_of_the_literature():
    arguments = parse_arguments(KINDS, NEEDED)[2]
    assert (arguments.learning_rate, arguments.adam_beta1, arguments.adam_beta2) == (5e-4, 0.9, 0.98)
    assert (arguments.warmup_steps, arguments.weight_decay, arguments.average_best) == (0.1, 0.01, 5)
    assert arguments.label_smoothing_factor == 0.1
    assert DeqNarTrainingArguments("x", objective="ctc+glat").label_smoothing_factor == 0.0


def test_validation_data_and_nothing_else_means_training_to_the_plateau():
    arguments = parse_arguments(KINDS, NEEDED)[2]
    arguments.set_evaluation(has_validation_data=True)
    assert (arguments.eval_strategy, arguments.early_stopping_patience) == ("epoch", 10)
    assert arguments.num_train_epochs == 100
    for flags, expected in [
        (["--max_steps", "5"], ("epoch", None)),
        (["--early_stopping_patience", "0"], ("epoch", 0)),
        (["--eval_strategy", "steps", "--early_stopping_patience", "3"], ("steps", 3)),
        (["--eval_strategy", "no"], ("no", 10)),
    ]:
        arguments = parse_arguments(KINDS, [*NEEDED, *flags])[2]
        arguments.set_evaluation(has_validation_data=True)
        assert (arguments.eval_strategy, arguments.early_stopping_patience) == expected
    arguments = parse_arguments(KINDS, NEEDED)[2]
    arguments.set_evaluation(has_validation_data=False)
    assert (arguments.eval_strategy, arguments.early_stopping_patience) == ("no", None)
    arguments.early_stopping_patience = 2
    with pytest.raises(ValueError, match="early_stopping_patience needs evaluations; give validation data"):
        arguments.set_evaluation(has_validation_data=False)


@pytest.mark.parametrize(
    ("flags", "updates", "warmup"),
    [
        ([], 2_000, 200),
        ([], 2_000_000, 10_000),
        (["--warmup_steps", "0.5"], 100_000, 10_000),
        (["--warmup_steps", "50000"], 100_000, 50_000),
        (["--warmup_steps", "0"], 2_000, 0),
    ],
)
def test_warmup_is_a_share_of_the_run_of_limited_length(flags, updates, warmup):
    assert parse_arguments(KINDS, [*NEEDED, *flags])[2].get_warmup_steps(updates) == warmup


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--per_device_train_batch_size", "32"], "per_device_train_batch_size=32 has no effect: batches are made by"),
        (["--load_best_model_at_end", "--eval_strategy", "steps"], "average_best selects the final weights"),
        (["--max_tokens", "0"], "max_tokens must be at least 1, not 0"),
        (["--correction", "-1"], "correction must be at least 0, not -1.0"),
        (["--correction_share", "0"], "correction_share must be above 0 and at most 1"),
        (["--early_stopping_patience", "3", "--eval_strategy", "no"], "early_stopping_patience needs evaluations"),
        (
            ["--objective", "ctc", "--label_smoothing_factor", "0.1"],
            "label_smoothing_factor=0.1 has no meaning for CTC",
        ),
        (["--label_smoothing_factor", "1.5"], "label_smoothing_factor must be below 1, not 1.5"),
        (["--beta", "0.3"], "beta has no effect on objective 'glat'; it is for dynamic_kd"),
        (["--correction_share", "0.5"], "correction_share=0.5 has no effect without correction"),
        (["--validation_limit", "5"], "validation_limit=5 has no effect without validation_data"),
        (["--save_only_model", "true"], "save_only_model=True: training cannot resume from such checkpoints"),
        (["--config", "activation_function=[relu"], r"config 'activation_function=\[relu': while parsing"),
        (["--gamma", "1"], "gamma has no effect on objective 'glat'; it is for dynamic_kd"),
        (
            ["--preset", "tiny", "--model", "x"],
            "model=x and preset=tiny are mutually exclusive starting points; give one",
        ),
        (["--optimizer", "sgd"], "optimizer 'sgd' is unknown; choose muon, or leave it unset"),
        (["--optimizer", "muon", "--optim", "sgd"], "optimizer=muon and optim=sgd are two optimisers; keep one"),
        (["--optimizer", "muon", "--optim_args", "momentum=0.8"], "optim_args=momentum=0.8 has no effect: it is for"),
        (["--preset", "huge"], "preset 'huge' is unknown; choose one of tiny, small"),
        (["--config", "lenght=ctc"], "config 'lenght' is not a field of DeqNarConfig"),
        (["--config", "length"], "config 'length' is not of the form field=value"),
        (["--learning_rat", "3", "--bogus", "1"], "'--bogus' is not understood"),
    ],
)
def test_invalid_training_arguments_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(KINDS, [*NEEDED, *flags])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("objektive: ce\n", "'objektive' is not a setting"),
        ("- a\n- b\n", "must consist of name: value entries"),
        ("a: [1\n", "is not valid YAML"),
        (b"\xff\xfe", "settings.yaml is not valid YAML"),
    ],
)
def test_settings_file_is_validated(tmp_path, text, message):
    file = tmp_path / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        parse_arguments(KINDS, [str(file)])
    with pytest.raises(FileNotFoundError, match="There is no settings file"):
        parse_arguments(KINDS, ["absent.yaml"])


def test_subword_dropout_is_a_probability_and_not_for_the_candidates_of_dynamic_kd(tmp_path):
    with pytest.raises(ValueError, match="subword_dropout must be at least 0 and below 1, not 1"):
        DeqNarTrainingArguments(str(tmp_path), subword_dropout=1.0, use_cpu=True)
    with pytest.raises(ValueError, match="subword_dropout_target=0.1 has no effect on the candidates"):
        DeqNarTrainingArguments(str(tmp_path), subword_dropout_target=0.1, objective="dynamic_kd", use_cpu=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truth_share": [0.5]}, "truth_share=\\[0.5\\] has no effect without state_weights"),
        ({"detach_states": False}, "detach_states=False has no effect without state_weights"),
        ({"random_segments": True}, "random_segments=True has no effect without state_weights"),
        ({"state_weights": [0.0, 0.0]}, "state_weights=\\[0.0, 0.0\\] must be numbers from 0, and not all 0"),
        ({"state_weights": [1.0], "truth_share": [0.6, 0.1]}, "truth_share=\\[0.6, 0.1\\] must be a share"),
        ({"state_weights": [1.0], "damage_share": 1.5}, "damage_share must be from 0 to 1, not 1.5"),
        ({"state_weights": [1.0], "segment_nfe": 0}, "segment_nfe must be at least 1, not 0"),
        ({"state_weights": [1.0], "correction": 0.5}, "correction=0.5 has no effect: .* equilibrium_weight=0"),
    ],
)
def test_options_of_supervised_states_are_checked(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DeqNarTrainingArguments(str(tmp_path), use_cpu=True, **options)
