#!/usr/bin/env bash
# Lets a server finish what it has: new requests are refused, running ones go on.
#
#   drain.sh [SECONDS]        MASW_HTTP_PORT, MASW_METRICS_PORT: of the server (8000, 8002)
#
# Triton does not drain by itself: on SIGTERM the next call from the loop to the target fails. So the
# loop model is unloaded first, and the server may be ended once this returns.
# Exit code: 0 nothing runs any more, 1 requests still ran after SECONDS (120), 2 wrong usage.
set -uo pipefail

limit=${1:-120}
[[ $limit =~ ^[0-9]+$ ]] || { echo "drain: SECONDS is '$limit'; give a whole number" >&2; exit 2; }
server=http://127.0.0.1:${MASW_HTTP_PORT:-8000}
metrics=http://127.0.0.1:${MASW_METRICS_PORT:-8002}/metrics
loop=tensorrt_llm_bls
ask=(curl --noproxy '*' --silent --fail)

# The sum of a metric over its labels; nothing is 0. Fails when there is no page.
total() {
    awk -v name="$1" 'index($1, name) == 1 { sum += $NF } END { print sum + 0 }' <<<"$page"
}

idle() {
    page=$("${ask[@]}" --max-time 5 "$metrics") || return 1
    [[ $(total masw_requests_inflight) == 0 ]] &&
        [[ $(total "nv_inference_pending_request_count{model=\"$loop\"") == 0 ]]
}

if ! "${ask[@]}" --max-time 5 --output /dev/null "$server/v2/health/live"; then
    echo "drain: no server answers on port ${MASW_HTTP_PORT:-8000}; nothing to drain" >&2
    exit 0
fi
"${ask[@]}" --max-time 30 --output /dev/null --request POST --data '{}' \
    "$server/v2/repository/models/$loop/unload" ||
    echo "drain: $loop could not be unloaded; new requests may still come in" >&2

quiet=0 # a request on its way from the queue to the loop is in neither count: look twice
deadline=$((SECONDS + limit))
while ((quiet < 2)); do
    if idle; then quiet=$((quiet + 1)); else quiet=0; fi
    if ((quiet < 2 && SECONDS >= deadline)); then
        echo "drain: requests still run after $limit s" >&2
        exit 1
    fi
    sleep 0.2
done
echo "drain: all requests finished" >&2
