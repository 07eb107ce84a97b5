"""Fields of any config that do not change the logits."""

# Bookkeeping, training, heads of other tasks and generation defaults: none of them changes the logits.
HARMLESS = frozenset(
    """
    architectures model_type torch_dtype dtype name_or_path tokenizer_class problem_type finetuning_task
    task_specific_params id2label label2id num_labels prefix tf_legacy_loss use_bfloat16 torchscript
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop gradient_checkpointing
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    use_cache output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    is_decoder chunk_size_feed_forward pretraining_tp n_ctx use_flash_attn attn_implementation
    predict_special_tokens output_past max_sequence_length is_llama_config neftune_noise_alpha
    do_sample temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size max_length min_length max_new_tokens min_new_tokens
    num_beams num_beam_groups num_return_sequences diversity_penalty early_stopping bad_words_ids
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    exponential_decay_length_penalty remove_invalid_values
    output_router_logits router_aux_loss_coef router_jitter_noise is_matryoshka matryoshka_dimensions
    """.split()  # noqa: SIM905
)
HARMLESS_PREFIXES = ("_", "transformers", "unsloth")
