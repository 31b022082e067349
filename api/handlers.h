/* handlers.h: one function per route (routes.c), by resource: h_jobs.c, h_state_dicts.c, h_images.c, h_device.c, h_checkpoints.c,
 * h_runs.c, h_followers.c, h_policies.c, h_webhooks.c, h_trash.c, h_storages.c, h_workers.c, h_system.c. */
#pragma once
#include "api/http.h"

FALLIBLE enum err h_jobs_list(struct req *r);
FALLIBLE enum err h_jobs_create(struct req *r);
FALLIBLE enum err h_job_get(struct req *r);
FALLIBLE enum err h_job_events(struct req *r);
FALLIBLE enum err h_job_plan(struct req *r);
FALLIBLE enum err h_job_cancel(struct req *r);
FALLIBLE enum err h_job_retry(struct req *r);

FALLIBLE enum err h_sdicts_list(struct req *r);
FALLIBLE enum err h_sdicts_create(struct req *r);
FALLIBLE enum err h_sdicts_withdraw(struct req *r);
FALLIBLE enum err h_sdict_get(struct req *r);
FALLIBLE enum err h_sdict_delete(struct req *r);
FALLIBLE enum err h_sdict_tensors(struct req *r);
FALLIBLE enum err h_sdict_digests(struct req *r);
FALLIBLE enum err h_rank_image(struct req *r);
FALLIBLE enum err h_rank_reserve(struct req *r);
FALLIBLE enum err h_rank_renew(struct req *r);
FALLIBLE enum err h_publications_list(struct req *r);
FALLIBLE enum err h_publication_get(struct req *r);
FALLIBLE enum err h_publication_follow(struct req *r);
FALLIBLE enum err h_rank_seal(struct req *r);
FALLIBLE enum err h_rank_release(struct req *r);
FALLIBLE enum err h_rank_copy(struct req *r);
FALLIBLE enum err h_descriptors(struct req *r);
FALLIBLE enum err h_device_images_list(struct req *r);
FALLIBLE enum err h_device_images_create(struct req *r);
FALLIBLE enum err h_device_image_get(struct req *r);
FALLIBLE enum err h_device_image_attach(struct req *r);
FALLIBLE enum err h_device_image_drop(struct req *r);

FALLIBLE enum err h_checkpoints_list(struct req *r);
FALLIBLE enum err h_checkpoint_get(struct req *r);
FALLIBLE enum err h_checkpoint_delete(struct req *r);
FALLIBLE enum err h_checkpoint_tensors(struct req *r);
FALLIBLE enum err h_checkpoint_tensor(struct req *r);
FALLIBLE enum err h_checkpoint_locate(struct req *r);
FALLIBLE enum err h_checkpoint_files(struct req *r);
FALLIBLE enum err h_checkpoint_file(struct req *r);
FALLIBLE enum err h_checkpoint_lineage(struct req *r);
FALLIBLE enum err h_checkpoint_hold(struct req *r);
FALLIBLE enum err h_checkpoint_unhold(struct req *r);
FALLIBLE enum err h_checkpoint_undelete(struct req *r);
FALLIBLE enum err h_trash_list(struct req *r);

FALLIBLE enum err h_followers_list(struct req *r);
FALLIBLE enum err h_followers_list_all(struct req *r);
FALLIBLE enum err h_follower_get(struct req *r);
FALLIBLE enum err h_follower_put(struct req *r);
FALLIBLE enum err h_follower_delete(struct req *r);
FALLIBLE enum err h_follower_tasks(struct req *r);
FALLIBLE enum err h_policy_preview(struct req *r);
FALLIBLE enum err h_webhook_test(struct req *r);
FALLIBLE enum err h_webhook_retry(struct req *r);

FALLIBLE enum err h_runs_list(struct req *r);
FALLIBLE enum err h_run_get(struct req *r);
FALLIBLE enum err h_run_resume(struct req *r);
FALLIBLE enum err h_run_resume_take(struct req *r);
FALLIBLE enum err h_run_drain(struct req *r);
FALLIBLE enum err h_alias_put(struct req *r);
FALLIBLE enum err h_alias_delete(struct req *r);

FALLIBLE enum err h_storages_list(struct req *r);
FALLIBLE enum err h_storages_create(struct req *r);
FALLIBLE enum err h_storage_get(struct req *r);
FALLIBLE enum err h_storage_meet(struct req *r);
FALLIBLE enum err h_workers_list(struct req *r);
FALLIBLE enum err h_nodes_list(struct req *r);
FALLIBLE enum err h_node_drain(struct req *r);
FALLIBLE enum err h_node_undrain(struct req *r);
FALLIBLE enum err h_node_forget(struct req *r);
FALLIBLE enum err h_spread_meet(struct req *r);
FALLIBLE enum err h_events(struct req *r);
FALLIBLE enum err h_audit(struct req *r);

FALLIBLE enum err h_capabilities(struct req *r);
FALLIBLE enum err h_doctor(struct req *r);
FALLIBLE enum err h_transforms(struct req *r);
FALLIBLE enum err h_transform(struct req *r);
FALLIBLE enum err h_livez(struct req *r);
FALLIBLE enum err h_readyz(struct req *r);
FALLIBLE enum err h_metrics(struct req *r);
FALLIBLE enum err h_openapi(struct req *r);
FALLIBLE enum err h_page(struct req *r);
bool h_page_exists(const struct req *r);     /* does the page have a file of this path? */
