"""Rules: each is violated by one case here, a usual run violates none, and all violations come at once."""

import dataclasses

import pytest

from megatron.training.config import ConfigError, Machine, check, choose_kernels, format_problems, load_config
from megatron.training.config.flags import all_flags
from megatron.training.config.rule_book import RULES, Setting
from megatron.training.config.rules_run import NOT_NEGATIVE, POSITIVE, REQUIRED
from megatron.training.config.rules_support import NOT_YET
from megatron.training.config.schema_parallel import DdpConfig
from megatron_fsdp.plan.strategy import OUTER_STRATEGIES, RESTING, plan_for
from tests.unit_tests.harness.strategies import STRATEGIES

CPU = Machine()
CUDA = Machine(has_cuda=True)
FULL = Machine(
    has_cuda=True,
    has_transformer_engine=True,
    has_apex_softmax=True,
    has_apex_layer_norm=True,
)

RUN = (
    "--use-megatron-fsdp --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--train-iters 8 --lr 1e-3 --mock-data --tokenizer-type ByteLevelTokenizer"
)

GOLDEN = """
    --num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 32 --train-iters 40 --lr 3e-4 --min-lr 3e-5
    --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --mock-data --tokenizer-type NullTokenizer --vocab-size 31999 --bf16 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --log-interval 1 --eval-interval 1000 --eval-iters 0 --split 99,1,0 --seed 1234
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
    --num-workers 1 --transformer-impl local --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --ckpt-format fsdp_dtensor --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32
"""

TINY = "--num-layers 2 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4 --seq-length 128 " \
       "--max-position-embeddings 128 --vocab-size 1023 --train-iters 20 --global-batch-size 8"  # fmt: skip


def found_by(name: str, argv: str, machine: Machine = CPU, world_size: int = 2) -> str:
    """The violations of one rule by a command line, as text."""
    (function,) = (function for function in RULES if function.__name__ == name)
    config = load_config(argv.split())
    setting = Setting(
        world_size=world_size,
        tensor_parallel_size=config.dist.tensor_model_parallel_size,
        machine=machine,
        kernels=choose_kernels(config, machine),
    )
    result = function(config, setting)
    return result if isinstance(result, str) else "\n".join(result or ())


@pytest.mark.parametrize("machine", [CPU, CUDA, FULL], ids=["cpu", "cuda", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_usual_run_is_fine_everywhere(machine: Machine, strategy: int) -> None:
    check(load_config(f"{RUN} --data-parallel-sharding-strategy {strategy}".split()), 2, machine)


@pytest.mark.parametrize("machine", [CPU, CUDA, FULL], ids=["cpu", "cuda", "full"])
def test_golden_flags_are_fine(machine: Machine) -> None:
    check(load_config(GOLDEN.split()), 8, machine)
    check(load_config(f"{GOLDEN} {TINY}".split()), 2, machine)


BUFFERS = "buffers_are_there_to_be_kept_or_registered"
GATHERS = "gathers_have_a_communicator_to_use"
BELONGS = "options_have_what_they_belong_to"
COPIES = "copies_have_gathers_to_make"

CASES = [
    ("required_fields_are_given", "", "--num-layers is missing"),
    ("counts_are_in_range", "--num-layers 0", "--num-layers is 0; it should be at least 1"),
    ("counts_are_in_range", "--suggested-communication-unit-size 0", "unit-size is 0; it should be at least 1"),
    ("counts_are_in_range", "--eval-iters -1", "--eval-iters is -1; it should be at least 0"),
    ("attention_divides", "--hidden-size 10 --num-attention-heads 4", "is not divisible by --num-attention-heads 4"),
    (
        "attention_divides",
        "--num-attention-heads 4 --group-query-attention --num-query-groups 3",
        "--num-attention-heads 4 is not divisible by --num-query-groups 3",
    ),
    ("attention_divides", "--num-attention-heads 4 --num-query-groups 2", "needs --group-query-attention"),
    ("activation_is_one", "--swiglu --squared-relu", "exclude each other"),
    ("dropout_is_a_probability", "--hidden-dropout 1", "--hidden-dropout is 1.0"),
    ("positions_reach_the_sequence", "--seq-length 9 --max-position-embeddings 8", "--seq-length 9 is longer"),
    ("rotary_flags_need_rope", "--rotary-base 5", "--rotary-base: only with --position-embedding-type rope"),
    ("precision_is_one", "--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
    ("loss_scaling_needs_fp16", "--bf16 --loss-scale 8", "--loss-scale needs --fp16"),
    ("loss_scaling_needs_fp16", "--fp16 --initial-loss-scale 0.5", "--initial-loss-scale is below --min-loss-scale"),
    ("data_has_one_source", "--mock-data --data-path a", "exclude each other"),
    ("data_has_one_source", "", "there is no data"),
    ("data_has_one_source", "--valid-data-path a", "need --train-data-path"),
    ("data_has_one_source", "--train-data-path a --split 9,1,0", "--split divides"),
    ("tokenizer_has_its_files", "--tokenizer-type NullTokenizer", "NullTokenizer needs --vocab-size"),
    ("tokenizer_has_its_files", "--tokenizer-type GPT2BPETokenizer", "GPT2BPETokenizer needs --merge-file"),
    ("tokenizer_has_its_files", "--tokenizer-type TikTokenizer", "TikTokenizer needs --tokenizer-model"),
    ("training_has_one_length", "--train-iters 1 --train-samples 1", "exclude each other"),
    ("training_has_one_length", "", "--train-iters is missing"),
    (
        "schedule_counts_as_training_does",
        "--train-iters 9 --lr-warmup-samples 2",
        "--lr-warmup-samples does not go with --train-iters; use --lr-warmup-iters",
    ),
    ("schedule_counts_as_training_does", "--train-samples 9 --lr-decay-iters 2", "use --lr-decay-samples"),
    ("warmup_has_one_length", "--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "exclude each other"),
    ("warmup_has_one_length", "--lr-warmup-fraction 1", "it should be from 0 to below 1"),
    (
        "warmup_has_one_length",
        "--train-iters 4 --lr-warmup-iters 4",
        "nothing of the decay's 4 iters; take fewer than 4",
    ),
    ("warmup_has_one_length", "--train-samples 4 --lr-warmup-samples 4", "the decay's 4 samples"),
    ("learning_rate_has_its_range", "", "--lr is missing"),
    ("learning_rate_has_its_range", "--lr 1e-3 --min-lr 1e-2", "--min-lr 0.01 is above --lr 0.001"),
    ("learning_rate_has_its_range", "--lr 1e-3 --lr-warmup-init 1", "--lr-warmup-init 1.0 is above"),
    ("wsd_has_its_last_phase", "--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
    ("wsd_has_its_last_phase", "--lr-wsd-decay-iters 3", "need --lr-decay-style WSD"),
    ("weight_decay_has_its_range", "--start-weight-decay 0", "need --weight-decay-incr-style"),
    ("weight_decay_has_its_range", "--weight-decay-incr-style linear", "needs --start-weight-decay"),
    (
        "weight_decay_has_its_range",
        "--weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1",
        "--start-weight-decay 2.0 should be from 0 to --end-weight-decay 1.0",
    ),
    (
        "schedule_has_one_owner",
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        "exclude each other",
    ),
    ("batch_divides", "--micro-batch-size 2 --global-batch-size 6", "x 2 data-parallel ranks; take 4 or 8"),
    ("batch_divides", "--micro-batch-size 2 --global-batch-size 1", "x 2 data-parallel ranks; take 4"),
    ("checkpoint_flags_have_their_directory", "--async-save", "--async-save needs --save DIRECTORY"),
    ("retained_checkpoints_are_saved", "--save-retain-interval 2", "which is not given"),
    ("retained_checkpoints_are_saved", "--save-retain-interval 3 --save-interval 2", "a multiple of --save-interval"),
    ("checkpoint_flags_have_their_directory", "--save-interval 2", "--save-interval needs --save DIRECTORY"),
    ("checkpoint_flags_have_their_directory", "--no-load-optim", "--no-load-optim needs --load DIRECTORY"),
    ("skip_train_has_something_to_do", "--skip-train --eval-iters 0", "--skip-train leaves only evaluation"),
    ("recompute_is_complete", "--recompute-granularity full", "needs --recompute-method and --recompute-num-layers"),
    ("recompute_is_complete", "--recompute-method block", "only with --recompute-granularity full"),
    ("recompute_is_complete", "--recompute-modules mlp", "needs --recompute-granularity selective"),
    ("recompute_is_complete", "--recompute-activations --recompute-modules moe", "expected core_attn, mlp"),
    (
        "recompute_is_complete",
        "--num-layers 1 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--recompute-num-layers 2 is more than --num-layers 1",
    ),
    (BELONGS, "--log-memory-to-tensorboard", "--log-memory-to-tensorboard needs --tensorboard-dir"),
    (BELONGS, "--no-log-loss-scale-to-tensorboard", "-loss-scale-to-tensorboard needs --tensorboard-dir"),
    (BELONGS, "--manual-gc-interval 5", "needs --manual-gc"),
    (BELONGS, "--moe-router-topk 1", "--moe-router-topk needs --num-experts"),
    (BELONGS, "--moe-token-dispatcher-type alltoall", "needs --num-experts"),
    (BELONGS, "--num-experts 2 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", "aux_loss"),
    (BELONGS, "--use-rotary-position-embeddings --rope-scaling-factor 4", "needs --use-rope-scaling"),
    (BELONGS, "--init-method-xavier-uniform --init-method-std 0.01", "--init-method-std needs normal initial weights"),
    (BELONGS, "--add-qkv-bias", "--add-qkv-bias needs --disable-bias-linear"),
    (BELONGS, "--reset-position-ids --position-embedding-type rope", "which alone reads positions"),
    (BELONGS, "--reset-attention-mask --no-create-attention-mask-in-dataloader", "the masks that"),
    (BELONGS, "--padded-vocab-size 512 --make-vocab-size-divisible-by 64", "--padded-vocab-size gives"),
    (BELONGS, "--tiktoken-num-special-tokens 5", "needs --tokenizer-type TikTokenizer"),
    (BELONGS, "--tokenizer-hf-no-include-special-tokens", "needs --tokenizer-type HuggingFaceTokenizer"),
    (BELONGS, "--optimizer sgd --adam-eps 1e-6", "--adam-eps needs --optimizer adam"),
    (BELONGS, "--sgd-momentum 0.5", "--sgd-momentum needs --optimizer sgd"),
    (BELONGS, "--weight-decay-incr-style linear --weight-decay 0.1", "needs a constant weight decay"),
    (BELONGS, "--lr-decay-style constant --min-lr 1e-5", "--min-lr needs a --lr-decay-style other than constant"),
    (BELONGS, "--lr-decay-style constant --lr-decay-iters 5", "--lr-decay-iters needs a --lr-decay-style"),
    (BELONGS, "--lr-warmup-init 1e-6", "--lr-warmup-init needs a warm-up"),
    (BELONGS, "--lr-wsd-decay-style linear", "--lr-wsd-decay-style needs --lr-decay-style WSD"),
    (BELONGS, "--fp16 --loss-scale 8 --hysteresis 1", "--hysteresis needs a dynamic loss scale"),
    (BELONGS, "--use-checkpoint-opt-param-scheduler", "needs --load DIRECTORY"),
    (BELONGS, "--override-opt-param-scheduler", "needs --load DIRECTORY"),
    (BELONGS, "--no-strict-fsdp-dtensor-load", "needs --load or --pretrained-checkpoint DIRECTORY"),
    (BELONGS, "--load a --dist-ckpt-strictness log_all", "needs --no-strict-fsdp-dtensor-load"),
    ("documents_stay_apart", "--reset-attention-mask --transformer-impl transformer_engine", "ignore its masks"),
    ("documents_stay_apart", "--reset-attention-mask --masked-softmax-fusion", "needs --no-masked-softmax-fusion"),
    ("recomputed_parts_are_there", "--num-experts 2 --recompute-activations --recompute-modules mlp", "nothing"),
    ("kept_weights_were_gathered", "--fsdp-residency-bytes auto --data-parallel-sharding-strategy 1", "optim_grads_"),
    ("not_here_yet", "--context-parallel-size 2", "--context-parallel-size 2 is not supported here"),
    (
        "tensor_parallel_ranks_share_evenly",
        "--tensor-model-parallel-size 2 --num-attention-heads 1",
        "--tensor-model-parallel-size 2 does not divide --num-attention-heads 1",
    ),
    ("tensor_parallel_ranks_share_evenly", "--tensor-model-parallel-size 4", "4 does not divide 2 ranks"),
    ("experts_are_shared_out", "--expert-model-parallel-size 2", "needs --num-experts"),
    ("experts_are_shared_out", "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 4", "data-parallel"),
    ("experts_are_shared_out", "--num-experts 3 --expert-model-parallel-size 2", "2 does not divide --num-experts 3"),
    ("experts_are_shared_out", "--num-experts 4", "needs --disable-bias-linear"),
    ("experts_are_shared_out", "--num-experts 1", "--moe-router-topk 2 is more than --num-experts 1"),
    ("experts_are_shared_out", "--num-experts 4 --tensor-model-parallel-size 2", "does not go with --tensor-model"),
    ("experts_are_shared_out", "--num-experts 4 --moe-router-topk 1", "needs --moe-router-pre-softmax"),
    ("not_here_yet", "--moe-grouped-gemm", "--moe-grouped-gemm is not supported here"),
    ("sequence_parallelism_has_ranks", "--sequence-parallel", "needs --tensor-model-parallel-size above 1"),
    (
        "sequence_parallelism_has_ranks",
        "--sequence-parallel --tensor-model-parallel-size 2 --transformer-impl local",
        "needs norms of TransformerEngine",
    ),
    ("not_here_yet", "--fp16 --fp16-lm-cross-entropy", "--fp16-lm-cross-entropy is not supported here"),
    ("not_here_yet", "--fp8-param-gather", "--fp8-param-gather is not supported here"),
    ("not_here_yet", "--no-use-mcore-models", "--no-use-mcore-models is not supported here"),
    ("megatron_fsdp_wraps_the_model", "", "--data-parallel-sharding-strategy no_shard"),
    ("fsdp_needs_its_checkpoint_format", "--save a --ckpt-format torch_dist", "Megatron-FSDP needs fsdp_dtensor"),
    ("fsdp_needs_its_checkpoint_format", "--ckpt-format torch", "Megatron-FSDP needs fsdp_dtensor"),
    ("format_of_fsdp_needs_fsdp", "--ckpt-format fsdp_dtensor", "needs --use-megatron-fsdp"),
    (GATHERS, "--create-all-gather-group --data-parallel-sharding-strategy no_shard", "no_shard makes none"),
    (GATHERS, "--create-all-gather-group --fsdp-copy-engine-gather", "has no effect with --fsdp-copy-engine-gather"),
    ("engines_exclude_each_other", "--use-megatron-fsdp --use-torch-fsdp2", "exclude each other"),
    ("fsdp_orders_ranks_itself", "--use-tp-pp-dp-mapping", "not supported with Megatron-FSDP"),
    ("fsdp_shards_the_optimizer", "--use-megatron-fsdp --no-use-distributed-optimizer", "no_shard"),
    (
        "outer_sharding_needs_inner",
        "--outer-dp-sharding-strategy optim --data-parallel-sharding-strategy optim",
        "needs --data-parallel-sharding-strategy optim_grads_params",
    ),
    ("outer_sharding_needs_inner", "--outer-dp-sharding-strategy optim", "--num-distributed-optimizer-instances above"),
    ("instances_divide_ranks", "--num-distributed-optimizer-instances 3", "does not divide the 2 data-parallel ranks"),
    ("gather_overlaps_only_with_reduce", "--overlap-param-gather", "needs --overlap-grad-reduce"),
    (
        "meta_device_needs_sharding",
        "--init-model-with-meta-device --data-parallel-sharding-strategy no_shard",
        "does not go with",
    ),
    (BUFFERS, "--use-nccl-ub", "--use-nccl-ub registers memory with NCCL, which needs CUDA"),
    (BUFFERS, "--fsdp-manual-registration", "--fsdp-manual-registration needs --use-nccl-ub"),
    (BUFFERS, "--disable-symmetric-registration", "--disable-symmetric-registration needs --use-nccl-ub"),
    (BUFFERS, "--fsdp-db-use-persist-buf-on-alloc-fail", "on-alloc-fail needs --fsdp-double-buffer"),
    (COPIES, "--fsdp-copy-engine-gather", "--fsdp-copy-engine-gather copies between GPUs, which needs CUDA"),
    (COPIES, "--fsdp-copy-engine-gather --data-parallel-sharding-strategy 0", "no_shard makes none"),
    (COPIES, "--fsdp-copy-engine-gather --use-nccl-ub", "leave out one"),
    ("averages_have_one_meaning", "--ddp-average-in-collective --calculate-per-token-loss", "exclude each other"),
    ("kernels_have_their_packages", "--masked-softmax-fusion", "leave it out or pass --no-masked-softmax-fusion"),
    ("kernels_have_their_packages", "--rope-fusion", "--rope-fusion needs TransformerEngine and CUDA"),
    ("kernels_have_their_packages", "--persist-layer-norm", "Apex's LayerNorm"),
    ("kernels_have_their_packages", "--transformer-impl transformer_engine", "which are not here; pass local"),
    ("kernels_have_their_packages", "--cross-entropy-fusion-impl te", "use native"),
    ("kernels_fit_the_model", "--bias-swiglu-fusion", "needs --swiglu"),
    ("kernels_fit_the_model", "--bias-gelu-fusion --swiglu", "needs an MLP of bias and GELU"),
    ("kernels_fit_the_model", "--rope-fusion", "needs --position-embedding-type rope"),
    ("kernels_fit_the_model", "--persist-layer-norm --normalization RMSNorm", "needs --normalization LayerNorm"),
    ("layers_know_the_option", "--attention-backend flash", "needs --transformer-impl transformer_engine"),
    ("layers_know_the_option", "--apply-layernorm-1p", "needs --transformer-impl transformer_engine"),
    ("backend_fits_the_machine", "--distributed-backend nccl", "needs CUDA"),
]


@pytest.mark.parametrize(("name", "argv", "message"), CASES, ids=[f"{name}: {argv}" for name, argv, _ in CASES])
def test_violation_is_reported(name: str, argv: str, message: str) -> None:
    assert message in found_by(name, argv)


def test_masks_of_documents_are_refused_where_kernels_ignore_them() -> None:
    """By default on a machine with TransformerEngine; Apex's softmax is not chosen with them."""
    assert "TransformerEngine's layers ignore" in found_by("documents_stay_apart", "--reset-attention-mask", FULL)
    apex = dataclasses.replace(FULL, has_transformer_engine=False)
    assert found_by("documents_stay_apart", "--reset-attention-mask", apex) == ""
    assert not choose_kernels(load_config(["--reset-attention-mask"]), apex).masked_softmax_fusion
    assert choose_kernels(load_config([]), apex).masked_softmax_fusion


def test_kernels_of_local_layers_are_refused_with_others() -> None:
    found = found_by("layers_know_the_option", "--masked-softmax-fusion --persist-layer-norm", FULL)
    assert "--masked-softmax-fusion needs --transformer-impl local" in found
    assert "--persist-layer-norm needs --transformer-impl local" in found


def test_violations_on_a_gpu_machine() -> None:
    one_queue = dataclasses.replace(CUDA, cuda_max_connections="1")
    assert "unset it" in found_by("streams_may_overlap", "--use-megatron-fsdp", one_queue)
    assert found_by("streams_may_overlap", "--use-megatron-fsdp", CUDA) == ""
    assert "gloo cannot train on CUDA" in found_by("backend_fits_the_machine", "--distributed-backend gloo", CUDA)
    assert "needs --transformer-impl local" in found_by("layers_know_the_option", "--attention-backend local", FULL)


def test_registered_memory_has_segments_that_stay() -> None:
    growing = dataclasses.replace(CUDA, allocator_conf="expandable_segments:True")
    assert found_by(BUFFERS, "--use-nccl-ub", CUDA) == ""
    assert "take expandable_segments out" in found_by(BUFFERS, "--use-nccl-ub", growing)
    assert found_by(BUFFERS, "--fsdp-double-buffer", growing) == ""


def test_a_number_of_bytes_is_what_int_reads() -> None:
    for text in ("²", "1e9", "-1", "AUTO"):
        found = found_by(BUFFERS, f"--fsdp-residency-bytes {text}")
        assert found == f"--fsdp-residency-bytes {text} is neither a number of bytes nor auto"
    assert found_by(BUFFERS, "--fsdp-residency-bytes 1000") == found_by(BUFFERS, "--fsdp-residency-bytes auto") == ""


def test_determinism_is_not_undone_by_the_environment() -> None:
    name = "nothing_undoes_determinism"
    for variables in ({}, {"NCCL_ALGO": "tree"}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}):
        assert found_by(name, "--deterministic-mode", dataclasses.replace(CUDA, determinism=variables)) == ""
    contrary = dataclasses.replace(CUDA, determinism={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "NCCL_ALGO": "NVLS"})
    found = found_by(name, "--deterministic-mode", contrary)
    assert "needs NVTE_ALLOW_NONDETERMINISTIC_ALGO to be 0, or not set; it is '1'" in found and "'NVLS'" in found
    assert found_by(name, "", contrary) == ""


def test_every_rule_has_a_case_and_a_sentence() -> None:
    names = {function.__name__ for function in RULES}
    assert names == {name for name, _, _ in CASES} | {"streams_may_overlap", "nothing_undoes_determinism"}
    assert [function.__name__ for function in RULES if not (function.__doc__ or "").endswith(".")] == []


def test_rules_name_fields_that_exist() -> None:
    assert set(REQUIRED) | set(POSITIVE) | set(NOT_NEGATIVE) | set(NOT_YET) <= set(all_flags())
    for path, (allowed, _) in NOT_YET.items():
        assert all_flags()[path].default in allowed, path


def test_all_violations_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as raised:
        check(load_config(f"{RUN} --bf16 --fp16 --context-parallel-size 2 --save-interval 3".split()), 2, CPU)
    assert len(raised.value.problems) == 3
    text = format_problems(raised.value)
    assert text.startswith("The configuration has 3 problems:\n  - ")


def test_only_evaluating_needs_no_training_flags() -> None:
    argv = RUN.replace("--train-iters 8 --lr 1e-3", "--skip-train --load checkpoints")
    check(load_config(argv.split()), 2, CPU)


@pytest.mark.parametrize("outer", OUTER_STRATEGIES)
@pytest.mark.parametrize("inner", RESTING)
def test_the_configuration_answers_as_the_engines_table(inner: str, outer: str) -> None:
    ddp = DdpConfig(data_parallel_sharding_strategy=inner, outer_dp_sharding_strategy=outer)
    assert ddp.shards_inner == plan_for(inner).shards_anything
    assert ddp.shards_outer == plan_for("optim_grads_params", outer, inner_size=1, outer_size=2).shards_anything
    assert ddp.shards_weights == plan_for(inner).gathers_weights  # as `EngineConfig` asks
