/* dispatch.h: the way of a request through the API, as http.c calls for it: who is it, may it, which route, which handler. */
#pragma once
#include "api/http.h"

extern const struct http_calls dispatch_calls;
