"""Options of `vllm serve` as plain data: which work here, which are ignored, which are rejected, and why.

The command line, config files and `LLM(...)` read this table (`config/vllm_options.py`), and the table in
`docs/from-vllm.md` is written from it. It has the options of vLLM 0.8.5, 0.11.2, 0.24.0 and 0.33.0. An option that
is ours too, by name, is ours: a row then only adds short flags and words for values.

An ignored option changes no answer. Options that would change answers, or that a server would miss, are rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """Value of an option that works otherwise. `why`: reason in a few words."""

    why: str


@dataclass(frozen=True, slots=True)
class IgnoredValue:
    """Value of an option that is ignored. `why`: reason why nothing is lost."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """Option that takes effect. `ours`: name of our option. `values`: vLLM's values, as text, and ours.

    `inverse`: switch that turns our option off. `note`: difference from vLLM.
    """

    name: str
    ours: str
    short: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    inverse: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Option without effect. `why`: reason why nothing is lost."""

    name: str
    why: str
    short: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Option that ends the start. `why`: reason. `harmless`: values, as text, that ask for nothing."""

    name: str
    why: str
    short: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()


VllmOption = Works | Ignored | Refused


def _works(
    name: str,
    ours: str | None = None,
    short: tuple[str, ...] = (),
    values: Mapping[str, Any] | None = None,
    inverse: bool = False,
    note: str = "",
) -> tuple[Works]:
    return (Works(name=name, ours=ours or name, short=short, values=dict(values or {}), inverse=inverse, note=note),)


def _words(words: str, meaning: Any) -> dict[str, Any]:
    return dict.fromkeys(words.split(), meaning)


def _same(names: str) -> list[Works]:
    return [Works(name=name, ours=name) for name in names.split()]


def _ignored(names: str, why: str, short: tuple[str, ...] = ()) -> list[Ignored]:
    return [Ignored(name, why, short) for name in names.split()]


def _refused(names: str, why: str, short: tuple[str, ...] = (), harmless: tuple[str, ...] = ()) -> list[Refused]:
    return [Refused(name, why, short, harmless) for name in names.split()]


# Reasons that several options share.
_NO_EXPERT_LORA = "adapters of experts are rejected"
_NO_PROMPT_ADAPTERS = "there are no prompt adapters; see --lora for LoRA adapters"
_NO_DRAFT_MODELS = "there are no draft models"
_ONE_JSON = "give --speculation, or --speculative-config with one JSON object"
_ONLY_TEXT = "models take text only, and requests with images, audio or video are rejected"
_NO_CLASSES = "there are no classes, rewards or transcriptions"
_NO_PLUGINS = "the server runs no code of other packages"
_ONE_CODE = "models and kernels are our own, which have no such choice"
_OTHER_HOSTS = "engines on other hosts are started by `roseinfer engine` or `roseinfer deploy`"
_ONLY_TENSOR_PARALLEL = "a model is shared by tensor parallelism only (--tensor-parallel-size)"
_NO_MAMBA = "there are no models with Mamba layers"
_NO_CONFIG_CHANGES = "config.json is used as it is"
_OWN_METRICS = "metrics are those of docs/reference/metrics.md, always on"
_OWN_LOG = "log lines are our own; see --log-level and --log-format"
_OWN_LOADER = "weights are read by our own loader, which needs no such setting"
_NO_WEIGHT_OFFLOAD = "weights stay on the device"
_EXPERTS = "the experts of a layer are shared as the rest of the model is, by tensor parallelism"
_ALWAYS = "it is always on"
_NO_DISAGGREGATION = "prompts and outputs are computed by the same engine"
_OTHER_FOUR_BITS = "of four bits, AWQ, GPTQ, compressed-tensors, NVFP4 and GGUF files can be read"
_OTHER_WEIGHTS = "weights are read from safetensors and GGUF files only"
_OTHER_KV = "K and V are stored as computed, or as fp8 (e4m3)"
_TRITON_WORDS = "TRITON_ATTN TRITON_ATTN_VLLM_V1 TRITON_MLA TRITON_UNIFIED_ATTENTION"
_OTHER_BACKENDS = (
    "FLASH_ATTN FLASH_ATTN_VLLM_V1 FLASHINFER FLASHINFER_VLLM_V1 FLASHINFER_MLA FLASHMLA FLASH_ATTN_MLA CUTLASS_MLA "
    "FLEX_ATTENTION XFORMERS ROCM_FLASH ROCM_ATTN ROCM_AITER_FA TREE_ATTN TURBOQUANT"
)

SECTIONS: Mapping[str, tuple[VllmOption, ...]] = {
    "Model": (
        *_same("model tokenizer revision seed enforce_eager max_logprobs download_dir device config"),
        *_works("dtype", values={"half": "float16", "float": "float32"}),
        *_works("max_model_len", values={"auto": None, "-1": None}, note="auto and -1: as far as the cache holds it"),
        *_works(
            "quantization",
            short=("-q",),
            values={
                **_words(
                    "none None gguf compressed-tensors fbgemm_fp8 awq awq_marlin auto_awq cpu_awq gptq gptq_marlin "
                    "gptq_bitblas auto_gptq moe_wna16 modelopt modelopt_fp4 petit_nvfp4",
                    None,
                ),
                **_words("bitsandbytes hqq aqlm marlin auto-round torchao inc", RefusedValue(_OTHER_FOUR_BITS)),
                **_words(
                    "modelopt_mxfp8 modelopt_mixed mxfp4 mxfp8 gpt_oss_mxfp4 quark experts_int8 deepspeedfp "
                    "ptpc_fp8 ipex rtn tpu_int8 online fp8_per_tensor fp8_per_block "
                    "int8_per_channel_weight_only fp_quant",
                    RefusedValue("weights have 16 or 32 bits, eight (fp8, int8), four as their checkpoint, or GGUF's"),
                ),
            },
            note="gguf, compressed-tensors, awq, gptq, modelopt and their kernels: as the checkpoint says",
        ),
        *_works(
            "load_format",
            values={
                **_words("safetensors gguf hf", "auto"),
                **_words(
                    "pt npcache tensorizer sharded_state bitsandbytes mistral runai_streamer "
                    "runai_streamer_sharded fastsafetensors instanttensor ipc_cache "
                    "modelexpress",
                    RefusedValue(_OTHER_WEIGHTS),
                ),
            },
        ),
        *_works(
            "attention_backend",
            values={
                **_words(_TRITON_WORDS, "triton"),
                **_words("TORCH_SDPA CPU_ATTN", "torch"),
                **_words(_OTHER_BACKENDS, "auto"),
            },
            note="there are two, triton for GPUs and torch for CPUs; other names mean auto",
        ),
        *_works(
            "served_model_name",
            note="several names may follow one flag; MODEL comes before them. With several models, one name for each",
        ),
        *_ignored("trust_remote_code", "no code that comes with a model is run"),
        *_ignored("code_revision", "no code that comes with a model is run"),
        *_works("runner", values={"draft": RefusedValue(_NO_DRAFT_MODELS)}),
        *_works("task", "runner", values=_words("embed embedding score", "pooling"), note=_NO_CLASSES),
        *_refused("convert", "--runner and --pooling say what a model returns", harmless=("auto", "none", "embed")),
        *_refused("pooler_config override_pooler_config", "--pooling chooses the method; the rest is the model's own"),
        *_refused(
            "tokenizer_mode", "tokenizers are read from tokenizer.json or GGUF", harmless=("auto", "slow", "fast", "hf")
        ),
        *_refused("skip_tokenizer_init", "the server needs a tokenizer"),
        *_refused("tokenizer_revision", "--revision is for model and tokenizer"),
        *_refused("hf_config_path hf_overrides rope_scaling rope_theta model_class_overrides", _NO_CONFIG_CHANGES),
        *_refused("config_format", "config.json is read in the format of Hugging Face", harmless=("auto", "hf")),
        *_refused("model_impl", "models are computed by our own code", harmless=("auto", "vllm")),
        *_refused("hf_token", "set the environment variable HF_TOKEN"),
        *_works("generation_config", values={"vllm": "none"}),
        *_works("override_generation_config", note="sampling fields only; max_new_tokens is rejected"),
        *_refused("enable_prompt_embeds", "prompts are text or token ids"),
        *_refused("logits_processors logits_processor_pattern io_processor_plugin", _NO_PLUGINS),
        *_refused(
            "logprobs_mode", "log probabilities are those before sampling parameters", harmless=("raw_logprobs",)
        ),
        *_refused("disable_sliding_window", _NO_CONFIG_CHANGES),
        *_refused("quantization_config", "weights are as the checkpoint says, or as --quantization"),
        *_ignored("allow_deprecated_quantization", "formats that are not supported are rejected by name"),
        *_refused("enable_return_routed_experts return_sampling_mask", "answers have no such field"),
        *_refused("enable_trace_replay", "outputs cannot be prescribed by a request"),
        *_refused("override_attention_dtype", "attention computes in --dtype"),
        *_refused("enable_sleep_mode", "weights stay loaded while a server runs"),
        *_ignored(
            "sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator "
            "enable_nccl_comm_suspend",
            "there is no sleep mode",
        ),
        *_ignored("use_fp64_gumbel", "draws are made by our own code"),
        *_ignored("disable_cascade_attn", "there is no cascade attention"),
        *_ignored("renderer_num_workers", "threads for prompts are chosen by the number of cores"),
        *_ignored(
            "use_tqdm_on_load model_loader_extra_config ignore_patterns pt_load_map_location "
            "safetensors_load_strategy "
            "safetensors_prefetch_num_threads safetensors_prefetch_block_size max_parallel_loading_workers",
            _OWN_LOADER,
        ),
        *_ignored("tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config", "threads tokenise prompts"),
        *_refused("qlora_adapter_name_or_path", "give --lora NAME=PATH"),
        *_refused("override_neuron_config", "devices are CPUs and NVIDIA GPUs"),
    ),
    "KV cache": (
        *_same("block_size kv_cache_memory_bytes enable_prefix_caching kv_offloading_size"),
        *_works("gpu_memory_utilization"),
        *_works("device_memory_utilization", "gpu_memory_utilization"),
        *_works(
            "kv_cache_dtype",
            values={
                "fp8_e4m3": "fp8",
                **_words(
                    "float16 bfloat16 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4_ds_mla turboquant_k8v4 "
                    "turboquant_4bit_nc turboquant_k3v4_nc turboquant_3bit_nc octave_k3v4 octave_k3v3 "
                    "octave_k3v3_compact ultraquant_4bit int4_per_token_head int8_per_token_head "
                    "fp8_per_token_head nvfp4 nvfp4_4over6",
                    RefusedValue(_OTHER_KV),
                ),
            },
        ),
        *_works("num_gpu_blocks_override", "num_kv_blocks"),
        *_works("disable_hybrid_kv_cache_manager", "enable_window_groups", inverse=True),
        *_ignored("swap_space", "preempted requests are computed again; see --kv-offloading-size for host memory"),
        *_ignored("kv_offloading_backend", "blocks in host memory are kept by our own code"),
        *_ignored(
            "prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval swa_bounded_replay",
            "the prefix cache is our own",
        ),
        *_refused("calculate_kv_scales", "scales of K and V are the checkpoint's, or 1"),
        *_refused("kv_cache_dtype_skip_layers", "all layers store K and V in one type"),
        *_refused("kv_sharing_fast_prefill", "every layer computes every token of a prompt"),
        *_ignored(
            "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend "
            "mamba_ssu_algorithm "
            "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint mamba_cache_philox_rounds "
            "replayssm_buffer_len use_replayssm gdn_prefill_backend kda_prefill_backend kda_decode_backend",
            _NO_MAMBA,
        ),
        *_refused("cpu_offload_gb offload_group_size", _NO_WEIGHT_OFFLOAD, harmless=("0", "0.0")),
        *_ignored(
            "cpu_offload_params offload_backend offload_num_in_group offload_prefetch_step offload_params",
            _NO_WEIGHT_OFFLOAD,
        ),
        *_refused("kv_transfer_config ec_transfer_config", _NO_DISAGGREGATION),
        *_ignored("ec_manager_config", _ONLY_TEXT),
        *_refused("kv_events_config", "give --kv-events-endpoint tcp://ADDRESS:PORT and the options beside it"),
    ),
    "Scheduler": (
        *_same(
            "max_num_seqs max_num_batched_tokens enable_chunked_prefill long_prefill_token_threshold "
            "max_num_queued_reqs"
        ),
        *_works(
            "scheduling_policy",
            values={"fcfs": "fifo", "priority": "slack"},
            note="priority: a request's priority weighs among ten levels, and requests with objectives come first",
        ),
        *_works("max_num_active_seqs", "max_active_requests"),
        *_works("async_scheduling", "overlap"),
        *_ignored("max_num_scheduled_tokens", "--max-num-batched-tokens limits a step"),
        *_refused("max_num_queued_tokens", "limit prompts by --max-num-queued-reqs, or give requests objectives"),
        *_ignored(
            "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold_adaptive "
            "prefill_schedule_interval scheduler_reserve_full_isl watermark scheduler_delay_factor "
            "num_scheduler_steps "
            "multi_step_stream_outputs num_lookahead_slots preemption_mode use_v2_block_manager "
            "disable_async_output_proc",
            "it tunes vLLM's scheduler; see `roseinfer serve --help=scheduler`",
        ),
        *_ignored("disable_chunked_mm_input", _ONLY_TEXT),
        *_refused(
            "scheduler_cls", "a policy of another package is found by its entry point (docs/how-to/add-a-policy.md)"
        ),
        *_ignored("stream_interval", "each token is sent as soon as it is there"),
    ),
    "Parallelism": (
        *_works("tensor_parallel_size", short=("-tp",)),
        *_works("data_parallel_size", "replicas", short=("-dp",), note="engines of this host, with a router"),
        *_works("api_server_count", "api_workers", short=("-asc",)),
        *_refused("pipeline_parallel_size", _ONLY_TENSOR_PARALLEL, ("-pp",), ("1",)),
        *_refused("decode_context_parallel_size", _ONLY_TENSOR_PARALLEL, ("-dcp",), ("1",)),
        *_refused("prefill_context_parallel_size", _ONLY_TENSOR_PARALLEL, ("-pcp",), ("1",)),
        *_ignored(
            "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
            _ONLY_TENSOR_PARALLEL,
        ),
        *_refused("data_parallel_rank", _OTHER_HOSTS, ("-dpn",), ("0",)),
        *_refused("data_parallel_start_rank", _OTHER_HOSTS, ("-dpr",), ("0",)),
        *_refused("data_parallel_size_local", _OTHER_HOSTS, ("-dpl",)),
        *_refused("data_parallel_address", _OTHER_HOSTS, ("-dpa",)),
        *_refused("data_parallel_backend", _OTHER_HOSTS, ("-dpb",), ("mp",)),
        *_refused("data_parallel_hybrid_lb", _OTHER_HOSTS, ("-dph",)),
        *_refused("data_parallel_external_lb", _OTHER_HOSTS, ("-dpe",)),
        *_refused("data_parallel_multi_port_external_lb", _OTHER_HOSTS, ("-dpm",)),
        *_ignored("data_parallel_rpc_port", "engines of this host need no port", ("-dpp",)),
        *_ignored(
            "data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s "
            "dp_supervisor_probe_failure_threshold dp_sync_interval disable_nccl_for_dp_synchronization",
            "replicas are independent engines; see --engine-timeout and --stall-timeout",
        ),
        *_refused("distributed_executor_backend", _OTHER_HOSTS, harmless=("mp", "uni")),
        *_refused("nnodes", _OTHER_HOSTS, ("-n",), ("1",)),
        *_refused("node_rank", _OTHER_HOSTS, ("-r",), ("0",)),
        *_refused("headless", _OTHER_HOSTS),
        *_ignored("master_addr master_port", _OTHER_HOSTS),
        *_ignored(
            "distributed_timeout_seconds cpu_distributed_timeout_seconds",
            "the processes of an engine have timeouts of their own",
        ),
        *_refused("device_ids", "choose GPUs with --devices"),
        *_ignored("numa_bind numa_bind_nodes numa_bind_cpus", "processes are not bound to cores"),
        *_ignored("enable_expert_parallel", _EXPERTS, ("-ep",)),
        *_ignored(
            "enable_ep_weight_filter all2all_backend enable_eplb eplb_config eplb_window_size eplb_step_interval "
            "eplb_log_balancedness num_redundant_experts expert_placement_strategy enable_elastic_ep "
            "elastic_ep_max_dp_size",
            _EXPERTS,
        ),
        *_ignored(
            "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold enable_hc_sp "
            "enable_batch_sharded_sampling enable_shm_tensor_arena disable_custom_all_reduce ray_workers_use_nsight",
            "how GPUs exchange data is chosen by our own code",
        ),
        *_refused("worker_cls", _NO_PLUGINS, harmless=("auto",)),
        *_refused("worker_extension_cls", _NO_PLUGINS, harmless=("",)),
        *_ignored("enable_fault_tolerance", "an engine that dies is replaced, and its requests continue on another"),
        *_ignored("fault_tolerance_config watchdog_config", "see --engine-timeout and --stall-timeout"),
    ),
    "Compilation and kernels": (
        *_ignored("compilation_config", _ONE_CODE, ("-cc", "-O")),
        *_ignored("attention_config", _ONE_CODE, ("-ac",)),
        *_ignored(
            "optimization_level performance_mode cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size "
            "max_seq_len_to_capture kernel_config ir_op_priority enable_flashinfer_autotune monokernel moe_backend "
            "linear_backend sparse_indexer_topk_backend",
            _ONE_CODE,
        ),
        *_ignored("additional_config engram_config aux_output_config jit_monitor_mode jit_monitor_verbose", _ONE_CODE),
        *_refused("weight_transfer_config", "weights do not change while a server runs"),
        *_refused("diffusion_config", "models generate from left to right", ("-dc",)),
        *_refused("profiler_config", "give --profile DIR"),
    ),
    "LoRA and speculation": (
        *_same("enable_lora"),
        *_works("lora_modules", "lora", note="NAME=PATH, or JSON with name and path; other fields are ignored"),
        *_works("max_loras", "lora_slots"),
        *_works("max_lora_rank", "lora_max_rank"),
        *_ignored("max_cpu_loras", "--lora-host-size limits the memory of adapters outside of slots"),
        *_ignored("fully_sharded_loras", "each process holds the part of an adapter that its part of a layer needs"),
        *_ignored("lora_dtype", "adapters are computed in the model's dtype"),
        *_ignored("specialize_active_lora", "CUDA graphs with and without adapters are captured"),
        *_ignored("enable_mixed_moe_lora_format enable_moe_shared_loras", _NO_EXPERT_LORA),
        *_ignored("max_lora_cls_labels lora_extra_vocab_size", "adapters that change the vocabulary are rejected"),
        *_refused("lora_target_modules", "an adapter applies to all layers that its file has"),
        *_refused("long_lora_scaling_factors", "contexts are the model's"),
        *_refused("enable_lora_bias", "adapters with biases are rejected"),
        *_refused("default_mm_loras enable_tower_connector_lora", _ONLY_TEXT),
        *_refused("enable_prompt_adapter prompt_adapters", _NO_PROMPT_ADAPTERS),
        *_ignored("max_prompt_adapters max_prompt_adapter_token", _NO_PROMPT_ADAPTERS),
        *_works(
            "speculative_config",
            "speculation",
            short=("-sc",),
            note="a JSON object; methods ngram, suffix, mtp and eagle3; other fields are named when they are ignored",
        ),
        *_refused("spec_method spec_model spec_tokens", _ONE_JSON),
        *_ignored("per_request_spec_decode_metrics", "/v1/requests/{id} always has the drafts of a request"),
        *_refused("watermark_config", "outputs are not watermarked"),
    ),
    "Tool calls, reasoning, structured outputs": (
        *_ignored("enable_auto_tool_choice", _ALWAYS),
        *_works(
            "tool_call_parser",
            values={
                **_words("llama3_json llama4_json", "llama_json"),
                **_words("qwen3_coder qwen3_xml", "qwen_xml"),
                **_words("llama4_pythonic olmo3", "pythonic"),
                **_words("openai", "harmony"),
                **_words(
                    "cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 "
                    "ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 "
                    "hunyuan_a13b hy_v3 internlm jamba kimi_k2 lfm2 longcat minimax minimax_m2 "
                    "phi4_mini_json poolside_v1 seed_oss step3 step3p5 xlam",
                    IgnoredValue("the format follows from the chat template"),
                ),
            },
        ),
        *_ignored("reasoning_parser enable_reasoning", "thinking is found by the chat template"),
        *_refused("tool_parser_plugin reasoning_parser_plugin", _NO_PLUGINS, harmless=("",)),
        *_refused("tool_server", "tools are called by the client"),
        *_refused("tool_strict_level", "a tool is strict if the request says so", harmless=("auto",)),
        *_refused("exclude_tools_when_tool_choice_none", "tools of a request are always in its prompt"),
        *_refused("reasoning_effort_map", "give chat_template_kwargs with each request"),
        *_ignored("reasoning_config", "see thinking_token_budget of a request"),
        *_ignored("structured_outputs_config guided_decoding_backend", "grammars are enforced by llguidance"),
        *_ignored(
            "cohere_is_reasoning_model cohere_format anthropic_disabled_thinking_effort",
            "the prompt follows from the model's chat template",
        ),
    ),
    "Server": (
        *_same(
            "host port chat_template allowed_origins enable_log_requests shutdown_timeout sse_keep_alive_interval "
            "log_level default_chat_template_kwargs enable_force_include_usage "
            "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers root_path"
        ),
        *_works("api_key", note="see ROSEINFER_API_KEY for the environment; VLLM_API_KEY is not read"),
        *_works("disable_log_requests", "enable_log_requests", inverse=True),
        *_works("disable_fastapi_docs", "enable_docs", inverse=True),
        *_works("uvicorn_log_level", "log_level", values={"trace": "debug", "critical": "error"}),
        *_works("otlp_traces_endpoint", "otlp_endpoint", note="OTLP over HTTP, port 4318; gRPC is not supported"),
        *_works("uds", note="rejected together with --host or --port, which vLLM ignores then"),
        *_refused("grpc grpc_port", "the server speaks HTTP"),
        *_refused("middleware", _NO_PLUGINS, harmless=("[]",)),
        *_refused("allow_credentials", "web pages send the API key as a header"),
        *_refused("allowed_methods allowed_headers", "--allowed-origins allows all of them", harmless=('["*"]', "*")),
        *_refused("return_tokens_as_token_ids", "send it with each request"),
        *_refused("chat_template_content_format", "templates get the text of a message", harmless=("auto", "string")),
        *_refused("response_role", "answers have the role assistant", harmless=("assistant",)),
        *_refused("trust_request_chat_template", "requests cannot bring a template"),
        *_refused("tokens_only enable_scale_out", _NO_DISAGGREGATION),
        *_refused("enable_ssl_refresh", "certificates are read at the start; restart the server to renew them"),
        *_ignored(
            "enable_prompt_tokens_details enable_request_id_headers enable_server_load_tracking "
            "enable_tokenizer_info_endpoint",
            _ALWAYS,
        ),
        *_ignored("enable_per_request_metrics", "see GET /v1/requests/ID"),
        *_ignored("disable_uvicorn_access_log disable_access_log_for_endpoints", _OWN_LOG),
        *_ignored(
            "max_log_len enable_log_outputs enable_log_deltas log_error_stack log_config_file logging_config "
            "aggregate_engine_logging",
            _OWN_LOG,
        ),
        *_ignored("disable_log_stats enable_logging_iteration_details", _OWN_METRICS),
        *_ignored("disable_frontend_multiprocessing", "engines always have processes of their own"),
        *_ignored("h11_max_incomplete_event_size h11_max_header_count", "the server has limits of its own on heads"),
        *_ignored("enable_offline_docs", "the viewer of /docs comes from a public server; see /openapi.json"),
        *_ignored("fingerprint_mode fingerprint_value", "answers have no system_fingerprint"),
        *_ignored("enable_flash_late_interaction", "there are no models with a vector for each token"),
        *_ignored("fail_on_environ_validation", "environment variables of vLLM are not read"),
    ),
    "Metrics and traces": (
        *_ignored(
            "show_hidden_metrics_for_version collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample "
            "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics custom_histogram_buckets",
            _OWN_METRICS,
        ),
    ),
    "Images, audio, video": (
        *_ignored(
            "language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs "
            "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb "
            "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
            "mm_encoder_fp8_scale_path "
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling "
            "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb "
            "mm_device_do_normalize disable_mm_preprocessor_cache enable_multimodal_encoder_data_parallel "
            "allowed_local_media_path allowed_media_domains trust_request_mm_kwargs",
            _ONLY_TEXT,
        ),
    ),
}

VLLM_OPTIONS: Mapping[str, VllmOption] = MappingProxyType(
    {option.name: option for options in SECTIONS.values() for option in options}
)

# Switches take no value and have a form with `no`. So do all options that begin with `enable_` or `disable_`.
_SWITCHES = frozenset(
    """aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling calculate_kv_scales
    cohere_is_reasoning_model cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb dcp_q_replicate eplb_log_balancedness exclude_tools_when_tool_choice_none
    fail_on_environ_validation fully_sharded_loras grpc headless interleave_mm_strings jit_monitor_verbose
    kv_cache_metrics kv_sharing_fast_prefill language_model_only log_error_stack long_prefill_token_threshold_adaptive
    mm_device_do_normalize mm_encoder_only monokernel multi_step_stream_outputs numa_bind ray_workers_use_nsight
    return_sampling_mask return_tokens_as_token_ids scheduler_reserve_full_isl skip_mm_profiling skip_tokenizer_init
    sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay tokens_only trust_remote_code
    trust_request_chat_template trust_request_mm_kwargs use_fp64_gumbel use_replayssm use_tqdm_on_load
    use_v2_block_manager""".split()  # noqa: SIM905
)
# Options after which several values may follow, or none.
LISTS = frozenset(
    """allowed_media_domains collect_detailed_traces cpu_offload_params cuda_graph_sizes cudagraph_capture_sizes
    device_ids hf_token kv_cache_dtype_skip_layers logits_processors lora_modules lora_target_modules numa_bind_cpus
    numa_bind_nodes offload_params prompt_adapters sleep_preserve_parameter_names""".split()  # noqa: SIM905
)


def is_switch(name: str) -> bool:
    return name != "disable_access_log_for_endpoints" and (
        name in _SWITCHES or name.startswith(("enable_", "disable_"))
    )
