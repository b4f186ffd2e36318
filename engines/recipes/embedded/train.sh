#!/usr/bin/env bash
# Trains the adaptors of the embedded pair, r = 8 and r = 4 (S = W = 128).
# Takes: MEETINGS (QMSum train, JSON lines), CODE (a folder of Python files that is not the standard
# library), TEXT (a long plain-text file), DOCUMENTS (JSON lines with "text": all of these and more,
# about 16M tokens), OUT. Gives: OUT/sft8/adaptor-r8.safetensors and OUT/sft4/adaptor-r4.safetensors.
# On one H200: answers 3 min, pretrain 3 min and sft 4 min for each r. Killed commands resume.
set -eu
MEETINGS=$1 CODE=$2 TEXT=$3 DOCUMENTS=$4 OUT=$5
mkdir -p "$OUT"

answers=()
for at in "2048 192 250" "4096 96 250" "7680 64 150"; do
  read -r prefix batch count <<< "$at"
  masw-train prompts "$OUT/p$prefix.jsonl.gz" --meetings "$MEETINGS" --code "$CODE" --text "$TEXT" \
    --prefixes "$prefix" --count "$count" --random-start --seed 1
  masw-train answers "$OUT/p$prefix.jsonl.gz" "$OUT/a$prefix.jsonl.gz" \
    --max-tokens 160 --batch-size "$batch" --dtype bfloat16 --device cuda
  answers+=(--data "samples=$OUT/a$prefix.jsonl.gz")
done

for r in 8 4; do
  common=(--intervals "$r" --offset --batch-tokens 65536 --micro-tokens 32768 --warmup 15 --device cuda)
  masw-train pretrain --data "text=$DOCUMENTS" --out "$OUT/pt$r" "${common[@]}" \
    --lengths 4096 --steps 110 --learning-rate 2e-3
  masw-train sft "${answers[@]}" --out "$OUT/sft$r" --start "$OUT/pt$r/adaptor-r$r.safetensors" \
    "${common[@]}" --lengths 2240,4288,7872 --prompt-weight 0.1 --steps 270 --learning-rate 1.5e-3
done
