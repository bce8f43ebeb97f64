# SPDX-License-Identifier: Apache-2.0
"""Names that other systems give to keys of Relax, for the error of an unknown key; docs/coming-from.md explains them."""

from __future__ import annotations

PAGE = "docs/coming-from.md"
_LORA = {
    "lora_alpha": "model.lora.alpha", "lora_r": "model.lora.rank", "lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.targets", "target_modules": "model.lora.targets", "use_peft": "model.lora.rank",
}  # fmt: skip
_TRL = {
    "beta": "algorithm.kl_coef", "cast_lm_head_to_fp32": "model.head_dtype", "dataset_name": "data.train",
    "delta": "algorithm.dual_clip", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "eval_dataset": "eval.sets", "eval_steps": "eval.every",
    "gradient_accumulation_steps": "batch.updates_per_step", "importance_sampling_level": "algorithm.name",
    "learning_rate": "optimizer.lr", "logging_steps": "sinks", "loss_type": "algorithm.aggregation",
    "lr_scheduler_type": "optimizer.schedule", "mask_truncated_completions": "rollout.truncated",
    "max_completion_length": "rollout.max_new_tokens", "max_grad_norm": "optimizer.grad_clip",
    "max_prompt_length": "data.max_prompt_tokens", "max_steps": "steps", "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size", "num_iterations": "batch.passes", "num_train_epochs": "epochs",
    "output_dir": "run.name", "per_device_train_batch_size": "rollout.groups_per_step", "report_to": "sinks",
    "reward_funcs": "rewards", "reward_weights": "rewards", "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "scale_rewards": "algorithm.normalise", "train_dataset": "data.train",
    "use_vllm": "engine.name", "vllm_importance_sampling_cap": "algorithm.correction_cap",
    "vllm_importance_sampling_correction": "algorithm.correction",
}  # fmt: skip
_VERL = {
    "adv_estimator": "algorithm.name", "clip_ratio": "algorithm.clip_low", "clip_ratio_c": "algorithm.dual_clip",
    "clip_ratio_high": "algorithm.clip_high", "clip_ratio_low": "algorithm.clip_low",
    "kl_loss_coef": "algorithm.kl_coef", "kl_loss_type": "algorithm.kl_estimator",
    "loss_agg_mode": "algorithm.aggregation", "max_response_length": "rollout.max_new_tokens",
    "ppo_epochs": "batch.passes", "ppo_max_token_len_per_gpu": "batch.tokens_per_micro_batch",
    "ppo_mini_batch_size": "batch.updates_per_step", "rollout.n": "rollout.group_size",
    "rollout_correction": "algorithm.correction", "save_freq": "checkpoint.every", "test_freq": "eval.every",
    "total_epochs": "epochs", "total_training_steps": "steps", "train_batch_size": "rollout.groups_per_step",
    "train_files": "data.train", "use_kl_in_reward": "algorithm.reward_kl_coef", "use_kl_loss": "algorithm.kl_coef",
    "val_files": "eval.sets",
}  # fmt: skip
_SLIME = {
    "advantage_estimator": "algorithm.name", "agent_command": "environment",
    "agentic_custom_advantage_path": "algorithm.advantages", "calculate_per_token_loss": "algorithm.aggregation",
    "colocate": "placement.mode", "custom_rm_path": "rewards", "disable_grpo_std_normalization": "algorithm.normalise",
    "dynamic_sampling_filter_path": "filters", "eps_clip": "algorithm.clip_low", "eps_clip_c": "algorithm.dual_clip",
    "eps_clip_high": "algorithm.clip_high", "fully_async": "placement.mode", "hf_checkpoint": "model.path",
    "hybrid": "placement.mode",
    "mask_offpolicy_in_partial_rollout": "rollout.late", "max_actor_ckpt_to_keep": "checkpoint.keep",
    "n_samples_per_prompt": "rollout.group_size", "num_epoch": "epochs", "num_rollout": "steps",
    "num_steps_per_rollout": "batch.updates_per_step", "opd_log_prob_top_k": "teachers", "opd_type": "teachers",
    "opsm_delta": "algorithm.sequence_mask_delta", "over_sampling_batch_size": "rollout.spare_groups",
    "prompt_data": "data.train", "ref_load": "reference.path", "rm_type": "rewards", "rm_url": "rewards",
    "rollout_batch_size": "rollout.groups_per_step", "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_temperature": "rollout.temperature", "rollout_top_k": "rollout.top_k", "rollout_top_p": "rollout.top_p",
    "save_hf": "export.every", "save_interval": "checkpoint.every", "sglang_enable_fp32_lm_head": "model.head_dtype",
    "tis_clip": "algorithm.correction_cap", "use_opd": "teachers", "use_opsm": "algorithm.sequence_mask_delta",
    "use_rollout_logprobs": "algorithm.correction", "use_rollout_routing_replay": "model.routing_replay",
    "use_routing_replay": "model.routing_replay", "use_tis": "algorithm.correction",
    "use_unbiased_kl": "algorithm.kl_estimator",
}  # fmt: skip
OTHER_NAMES = {**_LORA, **_TRL, **_VERL, **_SLIME}
"""Last part of another system's key, or its last two parts -> key of Relax."""
OTHER_TABLES = ("actor_rollout_ref", "custom_reward_function", "reward_model")
"""Tables of verl that have no counterpart as a whole."""


def hint(key: str) -> str:
    """Return the fix for a key that another system uses; empty if no known system does."""
    parts = key.lstrip("-").replace("-", "_").split(".")
    if parts[0] in OTHER_TABLES and len(parts) == 1:
        return f"this is a table of verl; {PAGE} maps its keys to those of Relax"
    ours = OTHER_NAMES.get(".".join(parts[-2:])) or OTHER_NAMES.get(parts[-1])
    return f"Relax calls it {ours}; {PAGE} explains the names of other systems" if ours and ours != key else ""
