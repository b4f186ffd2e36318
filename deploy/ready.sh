#!/usr/bin/env bash
# Whether a server gives tokens, and not only says that it is ready.
#
#   ready.sh [SECONDS]        MASW_HTTP_PORT, MASW_METRICS_PORT: of the server (8000, 8002)
#
# Triton stays "ready" when a model's process is dead or a rank hangs. So, besides its own answer,
# either tokens were emitted since the last look (a busy server is not asked for more), or one token
# is asked for and comes within SECONDS (8). The last look is kept in $TMPDIR.
# Exit code: 0 ready; 3 the loop model is unloaded, as in a drain; 1 anything else. The reason is on
# stderr.
set -uo pipefail

limit=${1:-8}
port=${MASW_HTTP_PORT:-8000}
server=http://127.0.0.1:$port
metrics=http://127.0.0.1:${MASW_METRICS_PORT:-8002}/metrics
loop=tensorrt_llm_bls
ask=(curl --noproxy '*' --silent --show-error --fail)
seen=${TMPDIR:-/tmp}/masw-emitted-$port

emitted() {
    "${ask[@]}" --max-time 2 "$metrics" 2>/dev/null |
        awk '$1 ~ /^masw_emitted_tokens_total/ { sum += $NF } END { printf "%.0f\n", sum }'
}

for page in health/ready "models/$loop/ready"; do
    answer=$("${ask[@]}" --max-time 2 --output /dev/null "$server/v2/$page" 2>&1) && continue
    code=$?
    echo "ready: /v2/$page on port $port is not 200: $answer" >&2
    [[ $page == models/* && $code == 22 ]] && exit 3 # the server answered, with an error status
    exit 1
done
now=$(emitted)
if [[ -f $seen && $now -gt $(<"$seen") ]]; then
    echo "$now" >"$seen"
    exit 0
fi
body='{"text_input": "1 2 3", "max_tokens": 1, "stream": false}'
if ! answer=$("${ask[@]}" --max-time "$limit" --data "$body" \
    "$server/v2/models/$loop/generate" 2>&1) || [[ $answer != *text_output* ]]; then
    echo "ready: no token came within $limit s: ${answer:0:500}" >&2
    exit 1
fi
emitted >"$seen" || true # without metrics the next look asks for a token again
