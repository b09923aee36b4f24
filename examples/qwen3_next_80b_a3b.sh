#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model of the size and shape of Qwen3-Next-80B-A3B on 64 GPUs (8 nodes of 8), both fusions on.
# Layout, memory and what is approximate: docs/real_size_model.md.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: qwen3_next_80b_a3b.sh flags                  print the training flags, one a line
       qwen3_next_80b_a3b.sh explain                say what the run would do, without a GPU
       qwen3_next_80b_a3b.sh train HOST [FLAG...]   start this node; HOST is one of the nodes
TEXT
}

model=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.02
    --attention-dropout 0 --hidden-dropout 0
    --max-position-embeddings 4096
    # Every fourth layer is softmax attention, with an output gate.
    --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256
    --attention-output-gate --qk-layernorm
    --position-embedding-type rope --rotary-percent 0.25 --rotary-base 10000000
    --experimental-attention-variant gdn --linear-attention-freq 4
    --linear-num-key-heads 16 --linear-num-value-heads 32
    --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-conv-kernel-dim 4
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
)
fusions=(--gdn-pre-gated-delta-rule-fusion --gdn-gated-output-norm-fusion)
# Experts are spread over the 8 GPUs of a node, layers over the 8 nodes.
layout=(
    --transformer-impl transformer_engine --bf16
    --pipeline-model-parallel-size 8 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective --recompute-modules gdn_norm_out moe_act layernorm
)
# Stand-ins: put your own data, tokenizer and schedule here. 151936 tokens with the end of document.
run=(
    --mock-data --tokenizer-type NullTokenizer --vocab-size 151935
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 1024
    --train-iters 1000 --lr 3e-4 --lr-warmup-iters 100 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 0 --log-interval 1
)
flags=("${model[@]}" "${fusions[@]}" "${layout[@]}" "${run[@]}")

case ${1:-} in
    flags) printf '%s\n' "${flags[@]}" ;;
    explain) exec gdn-list-fusions --explain -- "${flags[@]}" ;;
    train)
        host=${2:?"the host name of one of the nodes"}
        shift 2
        # What needs Transformer Engine to be installed even to be checked.
        exec torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d \
            --rdzv-endpoint "$host:29500" --rdzv-id qwen3-next \
            -m megatron.gdn.pretrain "${flags[@]}" --moe-permute-fusion "$@"
        ;;
    *)
        usage >&2
        exit 2
        ;;
esac
